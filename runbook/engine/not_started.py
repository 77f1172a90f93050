"""Launches that are not started: the machine is wrong, or their end is known already."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runbook.records import (
    Launch,
    LaunchEntry,
    LaunchResult,
    LaunchStatus,
    Outcome,
    PhaseRecord,
    satisfies,
)

# Ends that say nothing about the next start of the same command are not among them: a time limit, a
# signal from outside.
_REPEATABLE = (
    LaunchStatus.CRASHED,
    LaunchStatus.HUNG,
    LaunchStatus.NON_FINITE,
    LaunchStatus.OUT_OF_MEMORY,
)
_TWICE = 2
# More checks than this are counted beside the one that decides.
_NAMED = 3


def not_run(cause: str, *, follows: str) -> LaunchResult:
    """The result of a launch that is not started; `follows` as in `LaunchResult`."""
    return LaunchResult(status=LaunchStatus.NOT_RUN, attempts=0, cause=cause, follows=follows)


def held_back(record: PhaseRecord, *, strictly: bool) -> LaunchResult | None:
    """What becomes of every launch after this phase, if required checks are FAIL or INVALID.

    `strictly`: if any of them is anything but satisfied, as where a plan stops.
    """
    wrong = [
        check
        for check in record.checks
        if check.required
        and (check.outcome.rank <= Outcome.INVALID.rank or (strictly and not satisfies(check)))
    ]
    if not wrong:
        return None
    worst = min(wrong, key=lambda check: check.outcome.rank)
    others = [check.id for check in wrong if check is not worst]
    more = f" (and {len(others)} more)" if len(others) > _NAMED else ""
    more = more or (f" (and {', '.join(others)})" if others else "")
    way = "" if strictly else "; see --keep-going"
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
        alike = _same(entry.launch, launch)
        refused = entry.result.status is LaunchStatus.ENVIRONMENT_ERROR
        if refused or (alike and entry.result.could_not_start):
            cause = f"{entry.launch.name} was refused: {entry.result.cause}"
            return not_run(cause, follows=entry.launch.id)
    ended = [
        entry
        for entry in entries
        if entry.result.status in _REPEATABLE and _same(entry.launch, launch)
    ]
    for entry in ended:
        place = _place(entry.result.cause)
        times = sum(_tries(other) for other in ended if _place(other.result.cause) == place)
        if times >= (_TWICE if _may_be_an_accident(entry.result) else 1):
            cause = f"{entry.launch.name} is the same command and ended badly ({place})"
            return not_run(f"{cause}; see --keep-going", follows=entry.launch.id)
    return None


def _tries(entry: LaunchEntry) -> int:
    """How often the end was seen: a hang is tried again, and it hung both times."""
    return entry.result.attempts if entry.result.status is LaunchStatus.HUNG else 1


def _may_be_an_accident(result: LaunchResult) -> bool:
    hung = result.status is LaunchStatus.HUNG
    return hung or any(rank.signal for rank in result.ranks if rank.rank == result.culprit_rank)


def _same(first: Launch, second: Launch) -> bool:
    """Does the same command start, apart from where it writes?"""
    one, other = (
        (launch.words(), launch.env, launch.nproc, launch.commit) for launch in (first, second)
    )
    return one == other


def _place(cause: str) -> str:
    """The cause without the rank, which is a matter of who was first."""
    return re.sub(r"\brank \d+\b", "a rank", cause)
