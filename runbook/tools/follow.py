"""The launches of a run one after the other, as its link `latest` leads to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import sleep

from runbook.folder.journal import is_going_on
from runbook.folder.launch.documents import read_json_object
from runbook.folder.names import EVENTS_FILE, LAUNCH_JSON
from runbook.tools.watch import is_run_directory

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
    runs = [named, *sorted(named.parent.iterdir(), reverse=True)]
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
