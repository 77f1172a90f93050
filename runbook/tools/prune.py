"""Old runs: which may go, and their removal. Nothing else in the folder is ever touched."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from runbook.engine.history import metric_names, metric_rows
from runbook.engine.journal import read_events
from runbook.engine.ongoing import EVENTS_FILE, is_going_on, locked
from runbook.engine.outputs import RUN_ID, run_files
from runbook.engine.trends import trends
from runbook.errors import RunbookError
from runbook.records import Verdict
from runbook.stats.levels import LEVEL_WINDOW, level_runs

_GOING = ".removing-"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run folder, and why it stays; an empty `kept` means that it may go."""

    run_id: str
    size_bytes: int
    kept: str

    @property
    def goes(self) -> bool:
        """True if nothing keeps it."""
        return not self.kept


def find_old(
    out: Path, *, keep: int, older_than: timedelta, everything: bool, now: datetime | None = None
) -> list[Candidate]:
    """Every run folder of `out`, oldest first, with why it stays.

    One stays if it is among the `keep` newest (the newest always), younger than `older_than`, still
    going on, or, without `everything`, what later runs are held against: the last accepted run
    of a configuration, and those of its best level. Raises as the index does.
    """
    moment = now or datetime.now(UTC)
    runs = sorted(_run_folders(out), key=lambda folder: folder.name)
    newest = {folder.name for folder in runs[-max(keep, 1) :]}
    references = set() if everything else _references(out)
    found = []
    for folder in runs:
        age = moment - _started(folder.name)
        why = ""
        if folder.name in newest:
            why = "one of the newest" if keep > 1 else "the newest"
        elif age < older_than:
            why = f"{max(age.days, 0)} days old"
        elif folder.name in references:
            why = "later runs are held against it (--all)"
        elif is_going_on(folder):
            why = "still going on"
        found.append(Candidate(run_id=folder.name, size_bytes=_size(folder), kept=why))
    return found


def remove_run(out: Path, run_id: str) -> None:
    """Remove a run folder; it is gone at once under its name, whatever happens then.

    Raises `RunbookError` if it is no run folder of `out` or goes on, `OSError` if the disk refuses.
    """
    folder = out / run_id
    if not _is_run(folder):
        raise RunbookError(f"{folder} is no run folder")
    with locked(folder) as free:
        if not free:
            raise RunbookError(f"{run_id} is still going on")
        going = out / f"{_GOING}{run_id}"
        folder.rename(going)
    shutil.rmtree(going)


def _run_folders(out: Path) -> list[Path]:
    return [folder for folder in out.iterdir() if _is_run(folder)]


def _is_run(folder: Path) -> bool:
    """A real folder with the name of a run, whose journal begins with the start of that run."""
    if folder.is_symlink() or not folder.is_dir() or not RUN_ID.fullmatch(folder.name):
        return False
    journal = folder / EVENTS_FILE
    if journal.is_symlink() or not journal.is_file():
        return False
    try:
        _started(folder.name)
        events, _ = read_events(journal)
        return bool(events) and events[0]["record"]["run_id"] == folder.name
    except (RunbookError, ValueError, KeyError, TypeError):
        return False


def _started(run_id: str) -> datetime:
    match = RUN_ID.fullmatch(run_id)
    text = match["time"] if match else ""
    return datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)


def _references(out: Path) -> set[str]:
    """Of each comparable line of throughputs: the newest run that was GO, and its best level."""
    found: set[str] = set()
    for name in metric_names(out):
        if name.endswith(".throughput"):
            for trend in trends(metric_rows(out, name)):
                rows = [row for row in trend.rows if row.verdict == Verdict.GO and row.number]
                rows = rows[-LEVEL_WINDOW:]
                best = level_runs([row.number or 0.0 for row in rows])
                found |= {row.run_id for row in (*rows[best], *rows[-1:])}
    return found


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in run_files(folder))
