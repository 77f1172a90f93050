"""Before a launch starts: may it, is there time, and from which checkpoint.

A run in parts ends by itself within the time of each, and `--resume` goes on with the next.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nsa.contract import HEARTBEATS, checkpoint_step
from nsa.contract.digests import damage, identity_of
from runbook.errors import RunbookError
from runbook.folder.launch.rank_log import read_heartbeats
from runbook.launch import StopRequest
from runbook.records import (
    Begun,
    Launch,
    LaunchEntry,
    LaunchResult,
    LaunchStatus,
    PhaseRecord,
    satisfies,
)
from runbook.text import listed

# Ends that say nothing about the next start of the same command are not among them: a time limit, a
# signal from outside.
_REPEATABLE = (
    LaunchStatus.CRASHED,
    LaunchStatus.HUNG,
    LaunchStatus.NON_FINITE,
    LaunchStatus.OUT_OF_MEMORY,
)
_TWICE = 2


def not_run(cause: str, *, follows: str) -> LaunchResult:
    """The result of a launch that is not started; `follows` as in `LaunchResult`."""
    return LaunchResult(status=LaunchStatus.NOT_RUN, attempts=0, cause=cause, follows=follows)


def held_back(record: PhaseRecord, *, always: bool) -> LaunchResult | None:
    """What becomes of every launch after this phase, unless all its required checks are satisfied.

    One without an answer holds back like one that is wrong: no number after it can lead to a GO.
    `always`: nothing switches it off, as where a plan stops; else the cause names the option.
    """
    wrong = [check for check in record.checks if check.required and not satisfies(check)]
    if not wrong:
        return None
    worst = min(wrong, key=lambda check: check.outcome.rank)
    others = [check.id for check in wrong if check is not worst]
    more = f" (and {listed(others)})" if others else ""
    way = "" if always else "; see --keep-going"
    cause = f"{worst.id} is {worst.outcome}: {worst.reason}{more}{way}"
    return not_run(cause, follows=worst.id)


def known_end(launch: Launch, entries: Sequence[LaunchEntry]) -> LaunchResult | None:
    """Why this launch of a phase is not started, if the earlier ones leave no doubt; else None.

    A machine that cannot run the trainer refuses every launch, and a config each launch of its
    kind. A fault of the same command comes again; only a signal or a hang may have been an
    accident, and has to come twice. A launch that hung was tried twice by itself.
    """
    for entry in entries:
        if entry.launch.name == launch.resumes and not entry.result.ok:
            cause = f"it goes on from {launch.resumes}, which did not finish"
            return not_run(cause, follows=entry.result.follows or entry.launch.id)
    for entry in entries:
        refused = entry.result.status is LaunchStatus.ENVIRONMENT_ERROR
        if refused or (entry.result.could_not_start and _same(entry.launch, launch)):
            cause = f"{entry.launch.name} was refused: {entry.result.cause}"
            return not_run(cause, follows=entry.launch.id)
    ended = [
        entry
        for entry in entries
        if entry.result.status in _REPEATABLE and _same(entry.launch, launch)
    ]
    for entry in ended:
        place, result = _place(entry.result.cause), entry.result
        alike = [one.result for one in ended if _place(one.result.cause) == place]
        # A hang is tried again, and it hung both times.
        times = sum(one.attempts if one.status is LaunchStatus.HUNG else 1 for one in alike)
        killed = any(rank.signal for rank in result.ranks if rank.rank == result.culprit_rank)
        if times >= (_TWICE if killed or result.status is LaunchStatus.HUNG else 1):
            named = entry.launch.name if entry.launch.phase == launch.phase else entry.launch.id
            cause = f"{named} is the same command and ended badly ({place})"
            return not_run(f"{cause}; see --keep-going", follows=entry.launch.id)
    return None


def _same(first: Launch, second: Launch) -> bool:
    """Does the same command start, apart from where it writes?

    Of a trainer of one's own, phases differ in how many steps it takes alone.
    """
    if first.own is not None and first.own == second.own:
        return (first.env, first.nproc) == (second.env, second.nproc)
    one, other = (
        (launch.words(), launch.env, launch.nproc, launch.commit) for launch in (first, second)
    )
    return one == other


def _place(cause: str) -> str:
    """The cause without the rank, which is a matter of who was first."""
    return re.sub(r"\brank \d+\b", "a rank", cause)


# What stands in the record where a signal's name would.
TIME_LIMIT = "the time limit of this part"
PREEMPTION = "the pre-emption of its trainer"
# A run that ended so is INCOMPLETE, and no signal's number is its exit code.
NO_SIGNAL = (TIME_LIMIT, PREEMPTION)


@dataclass(kw_only=True)
class Part:
    """The time that this part of a run has, from when the object was made; None for no limit."""

    limit_s: float | None = None
    began: float = field(default_factory=time.monotonic)
    started_any: bool = False

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite without a limit."""
        if self.limit_s is None:
            return float("inf")
        return self.limit_s - (time.monotonic() - self.began)

    def has_time_for(
        self, launch: Launch, entries: Sequence[LaunchEntry], typical_s: float | None
    ) -> bool:
        """May this launch start, or would the limit only cut it off?

        The longest finished launch of as many steps says how long it takes, else `typical_s`; what
        nothing is known of is tried. The first launch of a part always starts: without that no
        part would ever go on with one that is longer than all of them.
        """
        if not self.started_any:
            return True
        alike = [
            entry.result.duration_s
            for entry in entries
            if entry.result.ok and entry.launch.steps == launch.steps
        ]
        return max(alike, default=typical_s or 0.0) <= self.left_s

    @contextmanager
    def ends(self, stop: StopRequest) -> Iterator[None]:
        """Ask to stop when the time is over, as a signal would."""
        if self.limit_s is None:
            yield
            return
        timer = threading.Timer(max(0.0, self.left_s), stop.request, (TIME_LIMIT,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def begin_at(run_root: Path, launch: Launch) -> Begun | None:
    """Where a launch that resumes another one of its phase begins.

    At that one's end (`Launch.after`, or the newest that it wrote), so that its own steps are all
    in its own files; where this checkpoint is damaged or is not the one that was written there, at
    the newest other one of the phase, one that a cut-off attempt saved included. None where the
    trainer told no digest of what it wrote.
    Raises `RunbookError` that names what is wrong with each if none is left.
    """
    told = [one for one in _told(run_root, launch) if one.step < launch.steps]
    before = f"{launch.phase}/{launch.resumes}/"
    end = launch.after or max((one.step for one in told if one.path.startswith(before)), default=0)
    refused: list[str] = []
    for one in sorted(
        told,
        key=lambda one: (one.path.startswith(before) and one.step == end, one.step),
        reverse=True,
    ):
        wrong = _wrong(run_root / one.path, one.sha256)
        if wrong is None:
            return one.model_copy(update={"refused": tuple(refused)})
        refused.append(f"{one.path}: {wrong}")
    if refused:
        raise RunbookError(f"no checkpoint of this run is left: {'; '.join(refused)}")
    return None


def _told(run_root: Path, launch: Launch) -> Iterator[Begun]:
    """The checkpoints that launches of the phase say they wrote, moved attempts included."""
    phase = run_root / launch.phase
    for folder in sorted(phase.iterdir() if phase.is_dir() else ()):
        path = folder / HEARTBEATS.name(0)
        if not path.is_file():
            continue
        for told in read_heartbeats(path, rank=0, relative_to=run_root).checkpoints:
            place, digest = str(told.get("path")), told.get("sha256")
            step = checkpoint_step(Path(place).name)
            if step is not None and isinstance(digest, str):
                where = f"{launch.phase}/{folder.name}/{place}"
                yield Begun(path=where, step=step, sha256=digest)


def _wrong(folder: Path, digest: str) -> str | None:
    try:
        if identity_of(folder) != digest:
            return "is not the checkpoint that was written there (its digest is another one)"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return damage(folder)
