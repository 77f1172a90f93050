"""Launches of the fake trainer, and what is alive afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runbook.launch import run_launch
from runbook.launch.observer import Observer
from runbook.launch.supervision import LaunchOptions
from runbook.launch.watch.rank_state import RankState
from runbook.launch.watch.watchdog import Budgets
from runbook.process import carriers
from runbook.records import Launch, LaunchResult
from tests.factory import records

ROOT = Path(__file__).parents[2]
FAKE = str(Path(__file__).with_name("fake_trainer.py"))
# Short where a test waits for its end, long where a busy machine only starts slowly.
FAST = Budgets(
    init_s=60, first_step_s=60, data_s=1.0, step_s=1.0, eval_s=60, checkpoint_s=60, silence_s=60
)


def fake_launch(*words: str, steps: int = 5, nproc: int = 2, **fields: object) -> Launch:
    told = {"name": "one", "nproc": nproc, "steps": steps, "timeout_s": 60}
    argv = ("python", FAKE, "--steps", str(steps), "--nproc", str(nproc), *words)
    return records.launch(*argv, **(told | fields))


class At(Observer):
    """Does something, once, when a launch has come to a step."""

    def __init__(self, step: int, act: Callable[[Launch], object]) -> None:
        self._step, self._act, self.done = step, act, False

    def launch_progress(
        self, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None:
        if step >= self._step and not self.done:
            self.done = True
            self._act(launch)


def run(launch: Launch, root: Path, **options: object) -> LaunchResult:
    """Run it with short budgets and without a retry, and check that nothing is left."""
    fields: dict[str, object] = {"budgets": FAST, "retry": False, "observer": Observer()}
    result = run_launch(launch, LaunchOptions(run_root=root, **fields | options))  # type: ignore[arg-type]
    assert carriers(result.run_token) == []
    return result


# The default budgets, as `runbook run` has them; or those of `run`.
_HARNESS = """
import sys
from pathlib import Path
from runbook.records import Launch
from tests.launch.helpers import FAST, run
budgets = FAST if sys.argv[3] == "fast" else None
run(Launch.model_validate_json(sys.argv[1]), Path(sys.argv[2]), budgets=budgets)
"""


def harness(launch: Launch, root: Path, budgets: str = "fast") -> subprocess.Popen[bytes]:
    """A process that does the same."""
    words = [launch.model_dump_json(), str(root), budgets]
    return subprocess.Popen([sys.executable, "-c", _HARNESS, *words], cwd=ROOT)


def trainer(*argv: str, **fields: object) -> Launch:
    told = {"name": "x", "run_dir": "x", "steps": 300, "timeout_s": 1}
    return records.launch(*argv, **(told | fields))


def rank(number: int, *, age: float, **said: Any) -> RankState:
    told: dict[str, Any] = {"phase": "step", "step": 5} | said
    return RankState(rank=number, path=Path("x"), changed_at=1000.0 - age, **told)
