"""The launcher: starts trainers and tests, watches them, ends them, and says how they ended.

Nothing else starts a launch; code belongs here if it needs a live process or its run directory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from runbook.errors import UsageError
from runbook.files import make_private_dir, write_atomic
from runbook.folder import CONSOLE_LOG, LAUNCH_JSON, RESULT_JSON
from runbook.folder.launch.documents import read_console, read_json_object
from runbook.launch.attempt import Attempt
from runbook.launch.command import RefusedError, build_command, check_out
from runbook.launch.end import is_communication_failure
from runbook.launch.launcher_api import other_launchers
from runbook.launch.supervision import LaunchOptions
from runbook.records import Begun, Launch, LaunchResult, LaunchStatus

# What launch.json has to say for a launch to be found again.
_DESCRIBED = frozenset({"argv", "attempt", "run_token", "started_at", "steps"})
_STALLS = (LaunchStatus.HUNG, LaunchStatus.SILENT)


def run_launch(launch: Launch, options: LaunchOptions) -> LaunchResult:
    """Run one launch to its end and say how it ended; nothing of it is alive afterwards.

    A stall or a failure of the collective library is tried once more, on another port and with
    `NCCL_DEBUG=INFO`; a wrong number never is. The files of the first attempt are kept beside the
    run directory, under its name with `.attempt1`.

    Raises `UsageError` for a launch that cannot be started as planned, `FileExistsError` if its
    run directory exists, `OSError` if the disk refuses.
    """
    return _settled(launch, _attempt(launch, 1, options), options)


def _settled(launch: Launch, result: LaunchResult, options: LaunchOptions) -> LaunchResult:
    """The result of the last attempt, written; a second one is made if the first deserves it."""
    run_root = options.run_root
    once_more = options.retry and result.attempts == 1 and not options.stop.requested
    if once_more and _worth_a_retry(launch, result, run_root):
        first = _first_attempt(launch, result, run_root)
        options.observer.note(f"{launch.name}: tried once more, on another port ({first.cause})")
        debugged = launch.model_copy(update={"env": {**launch.env, "NCCL_DEBUG": "INFO"}})
        result = _attempt(debugged, 2, options)
        cause = f"; attempt 2: {result.cause}" if result.cause else ""
        both = {
            "cause": f"attempt 1: {first.cause}{cause}",
            "evidence": (*first.evidence, *result.evidence),
        }
        result = result.model_copy(update=both)
    if options.begun is not None:
        result = result.model_copy(update={"begun": options.begun})
    path = run_root / launch.run_dir / RESULT_JSON
    write_atomic(path, result.model_dump_json(indent=2) + "\n")
    return result


def _attempt(launch: Launch, number: int, options: LaunchOptions) -> LaunchResult:
    run_dir = _inside(options.run_root, launch.run_dir)
    here = options.launcher.here
    if here and launch.nodes > 1:
        others = "|".join(other_launchers())
        raise UsageError(
            f"{launch.id} was planned for {launch.nodes} nodes, and this starts on one machine",
            hint=f"runbook run --launcher {others} starts it as it was planned",
        )
    make_private_dir(run_dir)
    root = options.run_root
    at = root / options.begun.path if options.begun else None
    command = build_command(
        launch, run_dir, retry=number > 1, here=here, run_root=root, begin_at=at
    )
    try:
        if launch.commit:
            folder = check_out(launch.commit, options.run_root, run_dir)
            command = replace(command, folder=folder)
        options.observer.launch_started(launch, number)
        with options.stop.deferred():
            return Attempt(launch, command, options, number).run()
    except RefusedError as error:
        status = LaunchStatus.ENVIRONMENT_ERROR
        return LaunchResult(status=status, attempts=number, cause=str(error))


def adopt_launch(launch: Launch, options: LaunchOptions) -> LaunchResult | None:
    """Go on with a launch that outlived the harness which started it, to its end.

    None if nothing of it is left to go on with, or if that harness saw its end; then its folder is
    as it was. The checkpoint that it goes on from is the one that it began with.
    """
    folder = options.run_root / launch.run_dir
    document = read_json_object(folder / LAUNCH_JSON, [])[0] or {}
    if not document.keys() >= _DESCRIBED or (folder / RESULT_JSON).exists():
        return None
    told = document.get("begun")
    options = replace(options, begun=Begun.model_validate(told) if told else None)
    attempt = Attempt.described(launch, document, options)
    with options.stop.deferred():
        place = options.launcher.adopt(attempt.start())
        if place is None:
            return None
        result = attempt.go_on(place)
    return _settled(launch, result, options)


def _inside(run_root: Path, name: str) -> Path:
    """The launch's folder; whatever a plan says, it lies below the run's."""
    run_dir = run_root / name
    root, wanted = run_root.resolve(), run_dir.resolve()
    if wanted == root or not wanted.is_relative_to(root):
        raise UsageError(
            f"run_dir {name!r} leaves the run's folder {root}", hint="use a name like phase/run1"
        )
    return run_dir


def _worth_a_retry(launch: Launch, result: LaunchResult, run_root: Path) -> bool:
    if not launch.has_ranks:
        return False
    if result.status in _STALLS:
        return True
    console = run_root / launch.run_dir / CONSOLE_LOG
    if not console.is_file():
        return False  # it was refused before anything of it ran
    lines, _ = read_console(console)
    return is_communication_failure(result, lines)


def _first_attempt(launch: Launch, result: LaunchResult, run_root: Path) -> LaunchResult:
    """Move the first attempt's files out of the way, its result among them."""
    kept = set_aside(run_root / launch.run_dir, "attempt")
    name = kept.relative_to(run_root).as_posix()
    paths = tuple(path.replace(launch.run_dir, name, 1) for path in result.evidence)
    moved = result.model_copy(update={"evidence": paths})
    write_atomic(kept / RESULT_JSON, moved.model_dump_json(indent=2) + "\n")
    return moved


def set_aside(run_dir: Path, word: str) -> Path:
    """Keep a run directory beside itself as `NAME.<word>N`; returns where it is now."""
    number = 1
    while (kept := run_dir.with_name(f"{run_dir.name}.{word}{number}")).exists():
        number += 1
    return run_dir.rename(kept)
