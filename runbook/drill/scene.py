"""One planted launch: the command, its budgets, and what was to be seen from outside."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nsa.contract import INJECTED_JSON
from runbook.drill.faults import BUDGET_S, Fault
from runbook.launch import Budgets, StopRequest, run_launch
from runbook.observer import Observer, SilentObserver
from runbook.records import Launch, LaunchResult
from runbook.watch import Thresholds

__all__ = ["Scene", "budgets_of", "drill_launch", "planted_at", "run_planted"]

_TIMEOUT_S = 240.0
# Small enough that a step takes milliseconds on one core; the parts are all there.
_CONFIG = {"train.seq_len": 64, "model.n_layers": 1, "train.eval_batches": 1}
_BUDGETS = Budgets(
    init_s=90, first_step_s=60, data_s=BUDGET_S, step_s=BUDGET_S, eval_s=30, checkpoint_s=30,
    exit_s=BUDGET_S, silence_s=90,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What one planting left: the result, the run's folder, when it was planted and when over."""

    root: Path
    launch: Launch
    result: LaunchResult
    planted_at: float | None
    ended_at: float
    attempts: tuple[int, ...] = (1,)
    remarks: tuple[str, ...] = ()

    @property
    def run_dir(self) -> Path:
        """The launch's own folder."""
        return self.root / self.launch.run_dir


def budgets_of(fault: Fault) -> Budgets:
    """Three seconds for what is quick, room for what is slow, and the fault's own."""
    return replace(_BUDGETS, **fault.budgets)


def drill_launch(fault: Fault, *, name: str, extra: tuple[str, ...] = ()) -> Launch:
    """The planted trainer on two gloo ranks."""
    plant = ("-m", "nsa.inject", fault.plant, str(fault.rank), str(fault.step), "--")
    trainer = ("--config", "configs/cpu_smoke.yaml", "--dataset", "synthetic", "--ddp", "1")
    return Launch(
        name=name,
        phase="drill",
        kind="trainer",
        argv=(
            "torchrun", "--nproc_per_node=2", *plant, *trainer, "--steps", str(fault.steps), *extra,
        ),
        env={"NSA_PREFILL_BATCHED": "1"},
        run_dir=name,
        nproc=2,
        steps=fault.steps,
        timeout_s=_TIMEOUT_S,
        config="configs/cpu_smoke.yaml",
        config_overrides={**_CONFIG, **fault.config},
        purpose=fault.title,
    )  # fmt: skip


def run_planted(
    fault: Fault,
    root: Path,
    *,
    name: str = "run",
    extra: tuple[str, ...] = (),
    observer: Observer | None = None,
    stop: StopRequest | None = None,
    retry: bool = False,
) -> Scene:
    """Run one planted launch in `root` to its verdict."""
    launch = drill_launch(fault, name=name, extra=extra)
    machine = {"OMP_NUM_THREADS": "1", **os.environ, **fault.machine}
    result = run_launch(
        launch,
        root,
        observer=observer or SilentObserver(),
        stop=stop,
        budgets=budgets_of(fault),
        retry=retry,
        machine=machine,
        watch=Thresholds(),
    )
    ended = time.monotonic()
    return Scene(
        root=root,
        launch=launch,
        result=result,
        planted_at=planted_at(root / launch.run_dir),
        ended_at=ended,
    )


def planted_at(run_dir: Path) -> float | None:
    """When the fault happened, on the monotonic clock; None if it never did."""
    try:
        document: Any = json.loads((run_dir / INJECTED_JSON).read_text(encoding="utf-8"))
        return float(document["mono"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
