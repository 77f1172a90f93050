"""`runbook` without a command: what there is in this folder, and what to do next.

It reads plain JSON and never validates a record, so that it answers at once, whatever lies there.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from runbook.console import Console, verdict_text
from runbook.defaults import DEFAULT_OUT
from runbook.errors import ProgramExit, UsageError
from runbook.folder.names import ENDS, EVENTS_FILE, RECORD_FILE

# A launch may be silent for as long (`runbook.launch.watch.watchdog.Budgets.silence_s`).
SILENT_S = 300.0
# Ends of a launch that leave nothing to triage (`runbook.tools.triage_target`).
NO_FAULT = ("completed", "not_run", "interrupted")
_WIDTH = 9


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is said of the newest run of a folder, and the commands that come next."""

    run: str
    detail: str = ""
    next: tuple[tuple[str, str], ...]


def print_next(console: Console) -> int:
    """At most ten lines on stdout; always exit code 0: nothing was asked that could fail."""
    found = look(Path(DEFAULT_OUT))
    console.result(f"{'machine':<{_WIDTH}}{_machine()}")
    console.result(f"{'run':<{_WIDTH}}{found.run}")
    if found.detail:
        console.result(f"{'':<{_WIDTH}}{found.detail}")
    commands = [*found.next, ("runbook --help", "all commands")]
    width = max(len(command) for command, _ in commands)
    for number, (command, why) in enumerate(commands):
        word = "next" if number == 0 else ""
        console.result(f"{word:<{_WIDTH}}{command:<{width}}  {why}")
    return ProgramExit.GO


def _machine() -> str:
    from runbook.machine.detect import detect_profile

    try:
        name, reason = detect_profile()
    except UsageError as error:
        return str(error.problems[0])
    return f"--profile auto takes {name}: {reason}"


def look(out: Path) -> Found:
    """The newest run below `out`. Raises nothing for what lies there."""
    try:
        folders = [path for path in out.iterdir() if is_run(path)]
    except OSError:
        folders = []
    if not folders:
        return Found(
            run=f"none in {out}/",
            next=(
                ("runbook run --dry-run", "what would run here, and how long it may take"),
                ("runbook run", "all phases, and the verdict"),
            ),
        )
    newest = max(folders, key=lambda path: path.name)
    return _unfinished(newest) or _finished(newest)


def is_run(path: Path) -> bool:
    """Does the folder hold a run, finished or not?"""
    return any((path / name).is_file() for name in (RECORD_FILE, EVENTS_FILE))


def _unfinished(folder: Path) -> Found | None:
    """A run whose journal has no end; None if it has one, or is not readable as a journal."""
    events = _events(folder / EVENTS_FILE)
    if not events or events[-1].get("event") == ENDS[0]:
        return None
    planned = events[0].get("phases")
    count = len(planned) if isinstance(planned, list) else 0
    done = sum(
        event.get("event") == "phase_finished" and not event.get("interrupted") for event in events
    )
    name = shlex.quote(str(folder))
    where = f"{folder}: not finished, {done} of {count} phases"
    resume = (f"runbook run --resume {name}", "go on where it was cut off")
    age_s = _age_s(folder)
    if events[-1].get("event") not in ENDS and age_s <= SILENT_S:
        return Found(
            run=where,
            detail=f"it wrote something {age_s:.0f} s ago, so it is probably running",
            next=(
                (f"runbook stacks {name}", "what its ranks are doing"),
                (resume[0], "only if it was killed: go on"),
            ),
        )
    return Found(run=where, next=(resume, (f"runbook report {name}", "what there is so far")))


def _finished(folder: Path) -> Found:
    from runbook.files import read_bytes

    name = shlex.quote(str(folder))
    report = (f"runbook report {name}", "every check, with evidence and remedy")
    try:
        record = json.loads(read_bytes(folder / RECORD_FILE))
        said = verdict_text(str(record["verdict"]), _texts(record["caveats"]))
        head = f"{folder}: {said} ({record['scope']})"
        reasons = _texts(record["reasons"])
    except FileNotFoundError:
        again = ("runbook run", "a new run: of this one nothing can be judged")
        return Found(run=f"{folder}: its {RECORD_FILE} is missing", next=(again,))
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        verify = (f"runbook verify {name}", "names every file that is damaged")
        return Found(run=f"{folder}: its {RECORD_FILE} cannot be read", next=(verify,))
    steps = [report, *_following(record, name)]
    return Found(run=head, detail=reasons[0] if reasons else "", next=tuple(steps))


def _following(record: dict[str, Any], name: str) -> list[tuple[str, str]]:
    """The command behind the report, by the verdict; a plan goes on by its own rules."""
    verdict, options = record["verdict"], record.get("options")
    if verdict == "GO":
        verify = (f"runbook verify {name}", "compute every number again")
        launch = _launch(record)
        return [(launch, "train behind this GO, by a plan"), verify] if launch else [verify]
    if verdict == "NO-GO" and _has_failed_launch(record):
        return [(f"runbook triage {name}", "find the setting that fixes its failed launch")]
    if isinstance(options, dict) and options.get("plan"):
        return []
    if verdict == "PARTIAL PASS":
        return [(f"runbook run --resume {name} --phase all", "add what was not asked for")]
    return [(f"runbook run --failed {name}", "run again what did not pass")]


def _launch(record: dict[str, Any]) -> str:
    """The launch behind this GO; empty where this program has none, or the record is damaged."""
    from runbook.records.run import Invocation

    own = (record.get("profile_document") or {}).get("own_trainer")
    try:
        settings, options = record["settings"], record["options"]
        if own or options.get("plan"):
            return ""
        return Invocation.recorded(record["profile"], settings, options).production_line()
    except (AttributeError, KeyError, TypeError, ValueError):
        return ""


def _has_failed_launch(record: dict[str, Any]) -> bool:
    """Is there one for `runbook triage`? Where the record is damaged there is none."""
    try:
        entries = [entry for phase in record["phases"] for entry in phase["launches"]]
        return any(
            entry["launch"]["kind"] == "trainer" and entry["result"]["status"] not in NO_FAULT
            for entry in entries
        )
    except (KeyError, TypeError):
        return False


def _texts(value: object) -> Sequence[str]:
    if not isinstance(value, list):
        raise TypeError(f"a list was expected, not {value!r}")
    return [str(text) for text in value]


def _events(path: Path) -> list[dict[str, Any]]:
    """The journal's events; empty if it is missing or damaged before its last line."""
    from runbook.files import read_bytes

    try:
        lines = read_bytes(path).splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
    except (OSError, ValueError, RecursionError):
        return []
    whole = all(isinstance(event, dict) for event in events)
    return cast("list[dict[str, Any]]", events) if whole else []


def _age_s(folder: Path) -> float:
    """Seconds since anything in the folder was written."""
    newest = 0.0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                newest = max(newest, (Path(place) / name).stat().st_mtime)
            except OSError:
                # Gone, or a link to nothing.
                continue
    return max(0.0, time.time() - newest)
