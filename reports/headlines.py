"""What failed, in one short sentence, as the end of a launch says it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runbook.records import LaunchEntry, LaunchStatus

# What was not finite, as the trainer ends: `loss nan on rank 1, gradient norm inf`.
_NUMBER = re.compile(r"(loss|gradient norm) (\S+?)(?: on ([^,]+(?:, \d+)*))?(?=,|$)")
_STEP = re.compile(r"\bat step (\d+)")
_WRITTEN = {"nan": "NaN", "inf": "infinite"}


def headline_of(entry: LaunchEntry | None, launches: Sequence[str]) -> str:
    """The sentence for the launch shown, of those that ended alike; empty where none fits."""
    if entry is None:
        return ""
    if entry.result.status is LaunchStatus.HUNG:
        return _hang(entry)
    if entry.result.status is LaunchStatus.NON_FINITE:
        return _divergence(entry, launches)
    return ""


def _hang(entry: LaunchEntry) -> str:
    result, steps = entry.result, _STEP.findall(entry.result.cause)
    if result.culprit_rank is None or not steps:
        return ""
    both = result.attempts == len(steps) > 1
    again = ", in both attempts" if both and len(set(steps)) == 1 else ""
    return f"Rank {result.culprit_rank} hung at step {steps[-1]}{again}."


def _divergence(entry: LaunchEntry, launches: Sequence[str]) -> str:
    found, steps = seen_non_finite(entry.result.cause), _STEP.findall(entry.result.cause)
    if not found or not steps:
        return ""
    ((what, value, ranks),) = found
    where = f" on {ranks}" if ranks else ""
    phases = {name.partition("/")[0] for name in launches}
    spread = f" ({len(phases)} phases, one cause)" if len(phases) > 1 else ""
    return f"Training diverged at step {steps[0]}: the {what} is {_WRITTEN[value]}{where}{spread}."


def seen_non_finite(cause: str) -> list[tuple[str, str, str]]:
    """What a launch saw that was not finite: the number, NaN or infinite, and on which ranks.

    The step is not looked at: one fault ends launches of other settings at other steps. A gradient
    norm follows from a loss that is not finite, so it counts only where the loss was finite.
    """
    found = [
        (what, value.lstrip("+-"), ranks)
        for what, value, ranks in _NUMBER.findall(cause)
        if value.lstrip("+-") in _WRITTEN
    ]
    return found[:1]
