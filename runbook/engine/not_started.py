"""Launches that are not started: the machine is wrong, or their end is known already."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runbook.records import Launch, LaunchEntry, LaunchResult, LaunchStatus, Outcome, PhaseRecord

# Ends that say nothing about the next start of the same command are not among them: a hang, a time
# limit, a signal from outside.
_REPEATABLE = (LaunchStatus.CRASHED, LaunchStatus.NON_FINITE, LaunchStatus.OUT_OF_MEMORY)
_TWICE = 2


def wrong_machine(record: PhaseRecord) -> str:
    """Why nothing should start after this phase: its required checks that are FAIL or INVALID."""
    wrong = [
        check
        for check in record.checks
        if check.required and check.outcome.rank <= Outcome.INVALID.rank
    ]
    if not wrong:
        return ""
    worst = min(wrong, key=lambda check: check.outcome.rank)
    others = [check.id for check in wrong if check is not worst]
    more = f" (and {', '.join(others)})" if others else ""
    return f"{worst.id} is {worst.outcome}: {worst.reason}{more}; see --keep-going"


def known_end(launch: Launch, entries: Sequence[LaunchEntry]) -> LaunchResult | None:
    """Why this launch of a phase is not started, if the earlier ones leave no doubt; else None.

    A machine that cannot run the trainer refuses every launch, and a config each launch of its
    kind. A fault that came twice, at the same place, comes a third time.
    """
    for entry in entries:
        alike = _same(entry.launch, launch)
        refused = entry.result.status is LaunchStatus.ENVIRONMENT_ERROR
        if refused or (alike and entry.result.could_not_start):
            return _not_run(f"{entry.launch.name} was refused: {entry.result.cause}")
    ended = [
        (entry.result.status, _place(entry.result.cause))
        for entry in entries
        if entry.result.status in _REPEATABLE and _same(entry.launch, launch)
    ]
    for end in dict.fromkeys(ended):
        if ended.count(end) >= _TWICE:
            return _not_run(f"{_TWICE} equal launches of this phase ended alike ({end[1]})")
    return None


def _not_run(cause: str) -> LaunchResult:
    return LaunchResult(status=LaunchStatus.NOT_RUN, attempts=0, cause=cause)


def _same(first: Launch, second: Launch) -> bool:
    """Does the same command start, apart from where it writes?"""
    one, other = (
        (launch.words(), launch.env, launch.nproc, launch.commit) for launch in (first, second)
    )
    return one == other


def _place(cause: str) -> str:
    """The cause without the rank, which is a matter of who was first."""
    return re.sub(r"\brank \d+\b", "a rank", cause)
