"""One launch with an injected fault: how it is run, and whether it was noticed as promised."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nsa.contract import INJECTED_JSON, TRAINING_CSV, Event
from runbook.launch import Budgets, StopRequest, run_launch
from runbook.launch.observer import Observer
from runbook.launch.reaper import carriers
from runbook.launch.watchdog import Thresholds
from runbook.read import read_training_csv
from runbook.read.heartbeats import heartbeat_files, heartbeats_in
from runbook.records import Launch, LaunchResult, LaunchStatus
from runbook.tools.drill.faults import BUDGET_S, Fault

_TIMEOUT_S = 240.0
_ORPHANS_AFTER_S = 1.0
# Three seconds for what is quick, room for what is slow; a fault may have its own.
_BUDGETS = Budgets(
    init_s=90, first_step_s=60, data_s=BUDGET_S, step_s=BUDGET_S, eval_s=30, checkpoint_s=30,
    exit_s=BUDGET_S, silence_s=90,
)  # fmt: skip
# Small enough that a step takes milliseconds on one core; the parts are all there.
_CONFIG = {"train.seq_len": 64, "model.n_layers": 1, "train.eval_batches": 1}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What one injection left: the result, the run's folder, when it was injected and when over."""

    root: Path
    launch: Launch
    result: LaunchResult
    injected_at: float | None
    ended_at: float
    remarks: tuple[str, ...] = ()

    @property
    def run_dir(self) -> Path:
        """The launch's own folder."""
        return self.root / self.launch.run_dir


def drill_launch(fault: Fault, *, name: str, extra: tuple[str, ...] = ()) -> Launch:
    """The injected trainer on two gloo ranks."""
    inject = ("-m", "nsa.inject", fault.inject, str(fault.rank), str(fault.step), "--")
    trainer = ("--config", "configs/cpu_smoke.yaml", "--dataset", "synthetic", "--ddp", "1")
    steps = ("--steps", str(fault.steps))
    return Launch(
        name=name,
        phase="drill",
        kind="trainer",
        argv=("torchrun", "--nproc_per_node=2", *inject, *trainer, *steps, *extra),
        env={"NSA_PREFILL_BATCHED": "1"},
        run_dir=name,
        nproc=2,
        steps=fault.steps,
        timeout_s=_TIMEOUT_S,
        config="configs/cpu_smoke.yaml",
        config_overrides={**_CONFIG, **fault.config},
        purpose=fault.title,
    )


def run_injected(
    fault: Fault,
    root: Path,
    *,
    name: str = "run",
    extra: tuple[str, ...] = (),
    observer: Observer | None = None,
    stop: StopRequest | None = None,
    retry: bool = False,
) -> Scene:
    """Run one injected launch in `root` to its verdict."""
    launch = drill_launch(fault, name=name, extra=extra)
    result = run_launch(
        launch,
        root,
        observer=observer or Observer(),
        stop=stop,
        budgets=replace(_BUDGETS, **fault.budgets),
        retry=retry,
        machine={"OMP_NUM_THREADS": "1", **os.environ, **fault.machine},
        watch=Thresholds(),
    )
    ended_at = time.monotonic()
    when = injected_at(root / launch.run_dir)
    return Scene(root=root, launch=launch, result=result, injected_at=when, ended_at=ended_at)


def injected_at(run_dir: Path) -> float | None:
    """When the fault happened, on the monotonic clock; None if it never did."""
    try:
        document: Any = json.loads((run_dir / INJECTED_JSON).read_text(encoding="utf-8"))
        return float(document["mono"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, kw_only=True)
class DrillRow:
    """One injected fault and how the harness did. `problems` is empty if it did as promised."""

    fault: str
    title: str
    detected: bool
    culprit_right: bool
    seconds: float | None
    threshold_s: float
    limit_s: float | None
    evidence: tuple[str, ...]
    orphans: int
    rows_lost: int
    cause: str
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Did everything go as promised?"""
        return not self.problems

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ok": self.ok}


def judge_scene(fault: Fault, scene: Scene) -> DrillRow:
    """Compare what was seen with what the fault promises."""
    orphans = _orphans(scene)
    result = scene.result
    cause_right = re.search(fault.cause, result.cause) is not None if fault.cause else True
    noted = not fault.note or any(fault.note in note for note in result.notes)
    ended_so = result.status in (fault.status, fault.or_status)
    detected = ended_so and cause_right and noted
    culprit_right = result.culprit_rank == fault.culprit
    control = fault.status is LaunchStatus.COMPLETED
    seconds = None if control or scene.injected_at is None else scene.ended_at - scene.injected_at
    lost, damage = _rows_lost(scene)
    files = sorted({path.rsplit("/", 1)[-1] for path in result.evidence})
    missing = [part for part in fault.evidence if not any(part in name for name in files)]
    problems = [*damage, *scene.remarks]
    if not ended_so:
        problems.append(f"ended as {result.status.value}, wanted {fault.status.value}")
    if not cause_right:
        problems.append(f"the cause does not say {fault.cause!r}")
    if not noted:
        problems.append(f"no note says {fault.note!r}: {list(result.notes)}")
    if control and not fault.note and result.notes:
        problems.append(f"false alarm: {list(result.notes)}")
    if not culprit_right:
        problems.append(f"blamed rank {result.culprit_rank}, wanted {fault.culprit}")
    if not control and scene.injected_at is None:
        problems.append("the fault was never injected")
    if seconds is not None and seconds > fault.limit_s:
        problems.append(f"took {seconds:.1f} s, allowed {fault.limit_s:g} s")
    if orphans:
        problems.append(f"{orphans} processes were left alive")
    if lost:
        problems.append(f"{lost} rows are lost")
    problems += [f"no evidence {part}" for part in missing]
    return DrillRow(
        fault=fault.name,
        title=fault.title,
        detected=detected,
        culprit_right=culprit_right,
        seconds=None if seconds is None else round(seconds, 3),
        threshold_s=fault.threshold_s,
        limit_s=None if control else fault.limit_s,
        evidence=tuple(files),
        orphans=orphans,
        rows_lost=lost,
        cause=result.cause,
        problems=tuple(problems),
    )


def _orphans(scene: Scene) -> int:
    """Processes with the launch's token that are alive a second after the verdict."""
    token = scene.result.run_token
    deadline = scene.ended_at + _ORPHANS_AFTER_S
    while token and carriers(token) and time.monotonic() < deadline:
        time.sleep(0.02)
    return len(carriers(token)) if token else 0


def _rows_lost(scene: Scene) -> tuple[int, list[str]]:
    """Steps that rank 0 said were written and that cannot be read back; and damaged files."""
    path = scene.run_dir / TRAINING_CSV
    said = _said_written(scene)
    if not path.is_file():
        return len(said), []
    log = read_training_csv(path, relative_to=scene.root)
    rows = set(log.frame["step"].tolist()) if "step" in log.frame else set()
    damage = [f"training.csv is damaged: {', '.join(log.problems)}"] if log.damaged else []
    return len(said - rows), damage


def _said_written(scene: Scene) -> set[int]:
    path = heartbeat_files(scene.run_dir).get(0) if scene.run_dir.is_dir() else None
    if path is None:
        return set()
    said = (beat["step"] for beat in heartbeats_in(path) if beat.get("event") == Event.PROGRESS)
    return set(map(int, said))
