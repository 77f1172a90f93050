"""Runs found by name and read, and what is said of one that changed or goes on.

`runbook` alone tells what there is in this folder and what to do next.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runbook import DEFAULT_OUT
from runbook.console import Console
from runbook.errors import ProgramExit, RunbookError, UsageError, called_by, did_you_mean, listed
from runbook.files import typed_here
from runbook.folder import ENDS, EVENTS_FILE, MANIFEST_FILE, RECORD_FILE, run_folders

if TYPE_CHECKING:
    from runbook.records import RunRecord


def find_run(text: str | None, out_dir: Path) -> Path:
    """The run that `text` names; without it the newest one of `out_dir`. Raises UsageError."""
    every = run_folders(out_dir)
    folders = [one for one in every if (one / RECORD_FILE).is_file()]
    if text is None:
        hint = "`runbook run` starts one, --out names another folder"
        if not folders:
            raise UsageError(f"no run in {out_dir}/", hint=hint)
        return folders[-1]
    path = Path(text)
    if path.name == RECORD_FILE and path.is_file():
        return path.parent
    if (path / RECORD_FILE).is_file():
        return path
    # A link such as `latest` leads to a launch: the run is the folder that it lies in.
    for above in path.resolve().parents if path.is_symlink() else ():
        if (above / RECORD_FILE).is_file():
            return above
    names = [folder.name for folder in folders]
    matches = [name for name in names if name.startswith(text)]
    if len(matches) == 1:
        return out_dir / matches[0]
    if matches:
        raise UsageError(f"{text!r} fits several runs in {out_dir}/: {', '.join(matches)}")
    for lost in (path, *(one for one in every if one.name.startswith(text))):
        if (lost / EVENTS_FILE).is_file():
            hint = "put it back from a copy, or begin a new run"
            raise UsageError(f"{lost} has lost its {RECORD_FILE}", hint=hint)
    known = f"runs in {out_dir}/: {', '.join(names[-5:])}" if names else f"no run in {out_dir}/"
    raise UsageError(
        f"no run {text!r}: neither a folder with {RECORD_FILE} nor the start of a run's id"
        f"{did_you_mean(text, names)}",
        hint=known,
    )


def folder_of(named: Path) -> Path:
    """The folder that is there, or may come to be; a bare name that is none is a run's id.

    Raises UsageError for one that fits no run.
    """
    there = named.exists() or len(named.parts) > 1 or named == Path(DEFAULT_OUT)
    return named if there else find_run(str(named), Path(DEFAULT_OUT))


def load_told(folder: Path, console: Console) -> tuple[RunRecord, str]:
    """The record and the `doubt` of it; a warning where that, or an artifact that changed, is one.

    A link in the run's folder, through which files of another place would be read, is a change.
    """
    from nsa.contract import CHECKPOINTS_DIR
    from runbook.engine.derive import doubt
    from runbook.folder.manifest import LINK, changed_artifacts, load_record, strange_entries

    record = load_record(folder)
    why = doubt(folder, record)
    # Checkpoints, of which no report tells, are large; `verify` reads them too.
    small = (one for one in record.artifacts if CHECKPOINTS_DIR not in Path(one.path).parts)
    # What is read through a link is no file of the run.
    links = (text for text in strange_entries(folder) if text.endswith(LINK))
    told = [f"{RECORD_FILE} {why}"] if why else []
    if changed := [*changed_artifacts(folder, small), *links]:
        told.append(f"changed since the run: {listed(changed, 1)}")
    if told:
        console.error(f"runbook: warning: {'; '.join(told)}; see runbook verify")
    return record, why


def running_line(folder: Path) -> str:
    """What is said of a run that still goes on, and how to look on; empty for any other."""
    from runbook.folder import running_text, watch_line

    text = running_text(folder)
    return f"{folder.name}: {text}; {watch_line(folder)}" if text else ""


def print_made(console: Console, folder: Path, record: RunRecord, shown: str = "") -> None:
    """Name what lies in a run's folder, as `shown`: a launch's newest checkpoint, page and text."""
    from nsa.contract import CHECKPOINTS_DIR, checkpoint_step

    made = [("report", folder / name) for name in ("report.html", "report.md")]
    if record.options.get("plan") and record.phases:
        last = (folder / record.phases[-1].name).glob(f"*/{CHECKPOINTS_DIR}/*")
        saved = {step: path for path in last if (step := checkpoint_step(path.name))}
        if saved:
            made.insert(0, ("checkpoint", saved[max(saved)]))
    for what, path in made:
        if path.exists():
            where = path.relative_to(folder).as_posix()
            console.result(f"{what}  {shlex.quote(f'{shown or folder}/{where}')}")


_LABEL = 9


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is said of the newest run of a folder, and the commands that come next."""

    run: str
    detail: str = ""
    next: tuple[tuple[str, str], ...]


def print_next(console: Console) -> int:
    """At most ten lines on stdout; always exit code 0: nothing was asked that could fail."""
    found = look(Path(DEFAULT_OUT))
    program = typed_here()
    commands = [
        (called_by(command, program), why)
        for command, why in (*found.next, ("runbook --help", "all commands"))
    ]
    width = max(len(command) for command, _ in commands)
    told = [("machine", _machine()), ("run", found.run)]
    told += [("", found.detail)] if found.detail else []
    lines = [f"{command:<{width}}  {why}" for command, why in commands]
    told += [("next", lines[0]), *(("", line) for line in lines[1:])]
    console.result(*(f"{name:<{_LABEL}}{text}" for name, text in told))
    return ProgramExit.GO


def _machine() -> str:
    from runbook.machine.gpu import detect_profile

    try:
        name, reason = detect_profile()
    except UsageError as error:
        return str(error.problems[0])
    return f"--profile auto takes {name}: {reason}"


def look(out: Path) -> Found:
    """The newest run below `out`. Raises nothing for what lies in its folder."""
    folders = run_folders(out)
    if not folders:
        return Found(
            run=f"none in {out}/",
            next=(
                ("runbook run --dry-run", "what would run here, and how long it may take"),
                ("runbook run", "all phases, and the verdict"),
                ("runbook init --help", "a profile for a trainer of your own"),
            ),
        )
    from runbook.folder.manifest import RUN_ID

    # Any other name is of a folder that was renamed or copied, and says nothing of when it began.
    newest = max(folders, key=lambda one: (bool(RUN_ID.fullmatch(one.name)), one.name))
    return _unfinished(newest) or _finished(newest)


def _unfinished(folder: Path) -> Found | None:
    """A run whose journal has no end; None if it has one, was cut, or is no journal."""
    from runbook.engine.derive import doubt
    from runbook.folder import events_so_far, phases_done, running_text, watch_line

    events = events_so_far(folder / EVENTS_FILE)
    if not events:
        return None
    name = shlex.quote(str(folder))
    if running := running_text(folder):
        return Found(
            run=f"{folder}: {running}",
            next=(
                (watch_line(folder), "look on"),
                (f"runbook stacks {name}", "what its ranks are doing"),
            ),
        )
    record, ended = _record(folder), (folder / MANIFEST_FILE).is_file()
    if events[-1].get("event") == ENDS[0] or (ended and (record is None or doubt(folder, record))):
        return None
    where = f"{folder}: not finished, {phases_done(events)}"
    again = record.invocation.resume_line(folder.name) if record else ""
    resume = (again or f"runbook run --resume {name}", "go on where it was cut off")
    return Found(run=where, next=(resume, (f"runbook report {name}", "what there is so far")))


def _record(folder: Path) -> RunRecord | None:
    """What its run.json holds; None if that is gone or damaged."""
    from runbook.folder.manifest import load_record

    try:
        return load_record(folder)
    except RunbookError:
        return None


def _finished(folder: Path) -> Found:
    from runbook.engine.derive import doubt
    from runbook.folder.manifest import renamed

    name, record = shlex.quote(str(folder)), _record(folder)
    if not (folder / RECORD_FILE).is_file():
        again = ("runbook run", "a new run: of this one nothing can be judged")
        return Found(run=f"{folder}: its {RECORD_FILE} is missing", next=(again,))
    why = "cannot be read" if record is None else doubt(folder, record)
    if record is None or why:
        verify = (f"runbook verify {name}", "names every file that is damaged")
        return Found(run=f"{folder}: its {RECORD_FILE} {why}", next=(verify,))
    report = (f"runbook report {name}", "every check, with evidence and remedy")
    moved = renamed(folder, record)
    told = [report] if moved else [*_following(record), report]  # by its id nothing finds it now
    return Found(
        run=f"{folder}: {record.headline}",
        detail=moved or next(iter(record.reasons), ""),
        next=(*told, *(one for one in _besides(record, name) if one[0] not in dict(told))),
    )


def _following(record: RunRecord) -> Iterator[tuple[str, str]]:
    """What the reports of the run say is next."""
    from runbook.config import registry

    following = registry.reports()["terminal"].following
    for step in following(record) if following else ():
        yield step.command, ", ".join(filter(None, (step.when, step.does)))


def _besides(record: RunRecord, name: str) -> Iterator[tuple[str, str]]:
    """What else there is to do with such a run."""
    from runbook.records import Verdict
    from runbook.tools.triage import failed_launches

    if record.verdict is Verdict.GO:
        yield f"runbook verify {name}", "compute every number again"
    elif record.verdict is Verdict.NO_GO and failed_launches(record):
        yield f"runbook triage {name}", "find the setting that fixes its failed launch"
