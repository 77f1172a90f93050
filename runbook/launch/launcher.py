"""`run_launch`: the one way in which a trainer or a test run is started."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from runbook.files import make_private_dir
from runbook.launch.attempt import Attempt, AttemptOptions
from runbook.launch.budgets import Budgets
from runbook.launch.classify import End, is_communication_failure
from runbook.launch.command import build_command
from runbook.launch.stop import StopRequest
from runbook.observer import Observer
from runbook.read.documents import read_console
from runbook.records import Launch, LaunchResult, LaunchStatus

__all__ = ["run_launch"]

_STALLS = (LaunchStatus.HUNG, LaunchStatus.SILENT)
_TOKEN_BYTES = 16


def run_launch(
    launch: Launch,
    run_root: Path,
    *,
    observer: Observer,
    stop: StopRequest | None = None,
    budgets: Budgets | None = None,
    enough: Callable[[Path], bool] | None = None,
    retry: bool = True,
    machine: Mapping[str, str] | None = None,
) -> LaunchResult:
    """Run one launch to its end and say how it ended; nothing of it is alive afterwards.

    A stall or a failure of the collective library is tried once more, on another port and with
    `NCCL_DEBUG=INFO` (seed 000, Stability Long-Run); a wrong number never is. The files of the
    first attempt are kept beside the run directory, under its name with `.attempt1`.
    `enough` is asked with the path of training.csv after each round of a schedule.

    Raises `UsageError` for a launch that cannot be started as planned, `FileExistsError` if its
    run directory exists, `OSError` if the disk refuses. Call it from a thread that stays alive:
    the children's lives hang on it.
    """
    stop = stop or StopRequest()
    first = _attempt(launch, run_root, 1, observer, stop, budgets, enough, machine)
    if (
        not retry
        or launch.kind != "trainer"
        or stop.requested
        or not _worth_a_retry(first, run_root)
    ):
        return first
    kept = _set_aside(run_root / launch.run_dir)
    observer.note(f"{launch.name}: tried once more, on another port ({first.cause})")
    second = _attempt(launch, run_root, 2, observer, stop, budgets, enough, machine)
    moved = tuple(
        path.replace(launch.run_dir, kept.relative_to(run_root).as_posix(), 1)
        for path in first.evidence
    )
    cause = f"attempt 1: {first.cause}" + (f"; attempt 2: {second.cause}" if second.cause else "")
    return second.model_copy(update={"cause": cause, "evidence": (*moved, *second.evidence)})


def _attempt(
    launch: Launch,
    run_root: Path,
    number: int,
    observer: Observer,
    stop: StopRequest,
    budgets: Budgets | None,
    enough: Callable[[Path], bool] | None,
    machine: Mapping[str, str] | None,
) -> LaunchResult:
    run_dir = run_root / launch.run_dir
    make_private_dir(run_dir)
    planned = launch
    if number > 1:
        planned = launch.model_copy(update={"env": {**launch.env, "NCCL_DEBUG": "INFO"}})
    command = build_command(planned, run_dir, retry=number > 1)
    options = AttemptOptions(
        run_root=run_root,
        token=secrets.token_hex(_TOKEN_BYTES),
        number=number,
        machine=os.environ if machine is None else machine,
        budgets=budgets or Budgets.for_launch(launch),
        observer=observer,
        stop=stop,
        enough=enough,
    )
    observer.launch_started(planned, number)
    with stop.deferred():
        return Attempt(planned, command, options).run()


def _worth_a_retry(result: LaunchResult, run_root: Path) -> bool:
    if result.status in _STALLS:
        return True
    console = next((path for path in result.evidence if path.endswith("/console.log")), "")
    if not console:
        return False
    lines, _ = read_console(run_root / console)
    end = End(status=result.status, cause=result.cause, culprit_rank=result.culprit_rank)
    return is_communication_failure(end, lines)


def _set_aside(run_dir: Path) -> Path:
    number = 1
    while (kept := run_dir.with_name(f"{run_dir.name}.attempt{number}")).exists():
        number += 1
    run_dir.rename(kept)
    return kept
