"""Which launch a folder means, and those of a run one after the other, by its link `latest`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from nsa.contract import HEARTBEATS, LATEST_LINK, TRAINING_CSV
from runbook.errors import UsageError
from runbook.folder.journal import is_going_on
from runbook.folder.launch.documents import read_json_object
from runbook.folder.names import EVENTS_FILE, LAUNCH_JSON, run_folders
from runbook.tools.watch import is_over, is_run_directory

_LOOK_EVERY_S = 1.0
# Launches that train nothing, by their kind.
_NOT_WATCHED = {"pytest": "tests", "collect": "facts of other machines"}


@dataclass(frozen=True, kw_only=True)
class Following:
    """A link, and the run that goes on whose launches it names."""

    link: Path
    run: Path

    def has_left(self, place: Path) -> bool:
        """Does the link name another launch, or has the run ended?"""
        return self.link.resolve() != place or not is_going_on(self.run)

    def next(self, place: Path) -> Path | None:
        """The launch of the run that comes after this one; None once the run has ended."""
        while is_going_on(self.run):
            found = self.link.resolve()
            if found != place and self.run in found.parents and is_run_directory(found):
                return found
            sleep(_LOOK_EVERY_S)
        return None


def following(place: Path) -> Following | None:
    """What is to be followed where `place` is a link; None for a folder, or if no run goes on.

    The run that it names, else the newest beside that: it has not started a launch yet.
    """
    if not place.is_symlink():
        return None
    named = run_of(place.resolve())
    if named is None:
        return None
    runs = [named, *reversed(run_folders(named.parent))]
    run = next((one for one in runs if is_going_on(one)), None)
    return Following(link=place, run=run) if run else None


def run_of(place: Path) -> Path | None:
    """The folder of the run to which a launch's folder belongs."""
    return next((one for one in place.parents if (one / EVENTS_FILE).is_file()), None)


def launch_name(place: Path) -> str:
    """`production/leg1 of 20261125T030838Z-def662f`; of a launch by hand its path."""
    run = run_of(place)
    return f"{place.relative_to(run).as_posix()} of {run.name}" if run else str(place)


def not_watched(place: Path) -> str:
    """What a launch is that has nothing to watch, such as `tests`; else an empty text."""
    document, _ = read_json_object(place / LAUNCH_JSON, [])
    launch = (document or {}).get("launch")
    kind = launch.get("kind") if isinstance(launch, dict) else None
    return _NOT_WATCHED.get(str(kind), "")


def launch_in(folder: Path, *, once: bool) -> Path:
    """The folder, or of a whole run its newest launch: by the link beside it if that leads there.

    A folder that is not there yet, or still empty, is waited for; only --once cannot wait, and
    what is a file becomes no folder.
    """
    if not folder.is_dir() and (once or folder.exists()):
        hint = "start the run first; it creates its own"
        raise UsageError(f"no such directory: {folder}", hint=hint)
    if is_run_directory(newest_in(folder)) or (folder / LATEST_LINK).is_symlink():
        return folder
    beside = folder.parent / LATEST_LINK
    if beside.is_symlink() and folder.resolve() in beside.resolve().parents:
        return beside
    if newest := _newest_below(folder):
        return newest
    if once:
        hint = f"one has {TRAINING_CSV} or heartbeat_rank*.jsonl"
        raise UsageError(f"nothing to read: {folder} is not a run directory", hint=hint)
    return folder


def _newest_below(folder: Path) -> Path | None:
    """The run directory below that was written last."""
    beats = _beats(folder, "*", "*/*", "*/*/*")
    return max(beats, key=lambda path: path.stat().st_mtime).parent if beats else None


def folders_of_ranks(folder: Path) -> list[Path]:
    """Directories with heartbeats: the one that is named, or all of a run's launches."""
    beats = _beats(folder.resolve(), ".", "*", "*/*")
    return sorted({path.parent.resolve() for path in beats})  # once, with a link `latest` too


def _beats(folder: Path, *depths: str) -> list[Path]:
    return [path for depth in depths for path in folder.glob(f"{depth}/{HEARTBEATS.glob()}")]


def newest_in(folder: Path) -> Path:
    """The run directory that is meant: the folder, or the one that its link `latest` names."""
    link = folder / LATEST_LINK
    return link if link.is_dir() and not is_run_directory(folder) else folder


def begun_in(
    folder: Path, *, interval_s: float, within_s: float, tell: Callable[[str], None]
) -> Path:
    """The run directory, as `newest_in`, once a run has begun there.

    A folder whose newest run was over before is waited for, as one that is not there yet or still
    empty: as long as a launch may be silent. Raises UsageError if no run has begun by then.
    """
    first = newest_in(folder)
    before = first.resolve() if first != folder and is_over(first) else None
    deadline, place = monotonic() + within_s, first
    if before or not is_run_directory(place):
        why = f"{place} is over" if before else _lacks(folder)
        tell(f"waiting for a run to begin in {folder}, {within_s:g} s at most: {why}")
    while place.resolve() == before or not is_run_directory(place):
        if monotonic() > deadline:
            raise UsageError(
                f"no run has begun in {folder} within {within_s:g} s",
                hint="start the run, then watch its own directory",
            )
        sleep(min(interval_s, _LOOK_EVERY_S))
        place = newest_in(folder)
    return place


def _lacks(folder: Path) -> str:
    if not folder.is_dir():
        return "it is not there yet"
    return f"no {TRAINING_CSV}, no heartbeat_rank*.jsonl and no link {LATEST_LINK} there yet"
