"""What the program says of itself: the overview of its commands, and `runbook` alone, which tells
what there is in this folder and what to do next.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.cli._parser import Command, is_phase
from runbook.console import Console
from runbook.defaults import DEFAULT_OUT
from runbook.errors import ProgramExit, RunbookError, UsageError, choice_for
from runbook.folder.names import ENDS, EVENTS_FILE, RECORD_FILE, run_folders

if TYPE_CHECKING:
    from runbook.records import RunRecord

_HEAD = """\
usage: runbook COMMAND [options]

Can this training run go to production on this machine, yes or no?
Runs the phases of the validation runbook and answers GO, NO-GO or INCOMPLETE, with the provenance
of every number."""

_FOOT = """\
options:
  -h, --help        show this help; `runbook help COMMAND` or `runbook COMMAND --help` shows more
  --version         show the version

examples:
  runbook                                what there is in this folder, and what to do next
  runbook run                            all phases, with the profile for this machine
  runbook run --dry-run                  print the commands that would run; start nothing
  runbook run --phase preflight,baseline --profile a100x2_pcie4
  runbook report                         show the report of the newest run

exit codes of `runbook run`: 0 GO, 1 NO-GO, 2 wrong usage, 3 INCOMPLETE, 4 PARTIAL PASS (of the
phases asked for), 70 internal error, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM

completion: eval "$(register-python-argcomplete runbook)" (nsa-runbook[completion])"""

_WIDTH = 16
# What were commands in version 0.1.0.
_NOW = {"bundle": "export --to bundle"}
_LABEL = 9


def overview(groups: Mapping[str, Sequence[Command]]) -> str:
    """The text of `runbook --help`: every command in one line, in its group."""
    blocks = [
        "\n".join([f"{title}:", *(f"  {one.name:<{_WIDTH}}  {one.help}" for one in commands)])
        for title, commands in groups.items()
    ]
    return "\n\n".join([_HEAD, *blocks, _FOOT])


def named(name: str, commands: Mapping[str, Command]) -> Command:
    """The command of this name. Raises UsageError with the nearest one."""
    if name not in commands:
        now = f" (it is `runbook {_NOW[name]}`)" if name in _NOW else ""
        now = now or (f" (a phase: `runbook run --phase {name}`)" if is_phase(name) else "")
        raise UsageError(f"unknown command {name!r}{now or choice_for(name, commands)}")
    return commands[name]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is said of the newest run of a folder, and the commands that come next."""

    run: str
    detail: str = ""
    next: tuple[tuple[str, str], ...]


def print_next(console: Console) -> int:
    """At most ten lines on stdout; always exit code 0: nothing was asked that could fail."""
    from runbook.files import typed_here
    from runbook.text import called_by

    found = look(Path(DEFAULT_OUT))
    console.result(f"{'machine':<{_LABEL}}{_machine()}")
    console.result(f"{'run':<{_LABEL}}{found.run}")
    if found.detail:
        console.result(f"{'':<{_LABEL}}{found.detail}")
    program = typed_here()
    commands = [
        (called_by(command, program), why)
        for command, why in (*found.next, ("runbook --help", "all commands"))
    ]
    width = max(len(command) for command, _ in commands)
    for number, (command, why) in enumerate(commands):
        word = "next" if number == 0 else ""
        console.result(f"{word:<{_LABEL}}{command:<{width}}  {why}")
    return ProgramExit.GO


def _machine() -> str:
    from runbook.machine.detect import detect_profile

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
            ),
        )
    return _unfinished(folders[-1]) or _finished(folders[-1])


def _unfinished(folder: Path) -> Found | None:
    """A run whose journal has no end; None if it has one, or is not readable as a journal."""
    from runbook.folder.journal import events_so_far, phases_done, running_text, watch_line

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
    if events[-1].get("event") == ENDS[0]:
        return None
    where = f"{folder}: not finished, {phases_done(events)}"
    record = _record(folder)
    again = record.invocation.resume_line(record.run_id) if record else ""
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
    from runbook.engine.intact import doubt

    name, record = shlex.quote(str(folder)), _record(folder)
    if not (folder / RECORD_FILE).is_file():
        again = ("runbook run", "a new run: of this one nothing can be judged")
        return Found(run=f"{folder}: its {RECORD_FILE} is missing", next=(again,))
    why = "cannot be read" if record is None else doubt(folder, record)
    if record is None or why:
        verify = (f"runbook verify {name}", "names every file that is damaged")
        return Found(run=f"{folder}: its {RECORD_FILE} {why}", next=(verify,))
    report = (f"runbook report {name}", "every check, with evidence and remedy")
    return Found(
        run=f"{folder}: {record.headline}",
        detail=record.reasons[0] if record.reasons else "",
        next=(*_following(record), report, *_besides(record, name)),
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
    from runbook.tools.triage_target import failed_launches

    if record.verdict is Verdict.GO:
        yield f"runbook verify {name}", "compute every number again"
    elif record.verdict is Verdict.NO_GO and failed_launches(record):
        yield f"runbook triage {name}", "find the setting that fixes its failed launch"
