"""Launches whose end is known before they are started: the same one ended so already."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runbook.records import Launch, LaunchEntry, LaunchResult, LaunchStatus

# Ends that say nothing about the next start of the same command are not among them: a hang, a time
# limit, a signal from outside.
_REPEATABLE = (LaunchStatus.CRASHED, LaunchStatus.NON_FINITE, LaunchStatus.OUT_OF_MEMORY)
_TWICE = 2


def known_end(launch: Launch, entries: Sequence[LaunchEntry]) -> LaunchResult | None:
    """How this launch of a phase would end, if the earlier ones leave no doubt; else None.

    A machine that cannot run the trainer refuses every launch, and a config each launch of its
    kind: that result stands for this one. A fault that came twice, at the same place, comes a third
    time: then this one is simply not run.
    """
    for entry in entries:
        alike = _same(entry.launch, launch)
        refused = entry.result.status is LaunchStatus.ENVIRONMENT_ERROR
        if refused or (alike and entry.result.could_not_start):
            kept = {
                "attempts": 0,
                "duration_s": 0.0,
                "ranks": (),
                "run_token": "",
                "started_at": "",
            }
            return entry.result.model_copy(update=kept)
    ended = [
        (entry.result.status, _place(entry.result.cause))
        for entry in entries
        if entry.result.status in _REPEATABLE and _same(entry.launch, launch)
    ]
    for end in dict.fromkeys(ended):
        if ended.count(end) >= _TWICE:
            cause = f"{_TWICE} equal launches of this phase ended alike ({end[1]})"
            return LaunchResult(status=LaunchStatus.NOT_RUN, attempts=0, cause=cause)
    return None


def _same(first: Launch, second: Launch) -> bool:
    """Does the same command start, apart from where it writes?"""
    return (first.words(), first.env, first.nproc) == (second.words(), second.env, second.nproc)


def _place(cause: str) -> str:
    """The cause without the rank, which is a matter of who was first."""
    return re.sub(r"\brank \d+\b", "a rank", cause)
