"""One answer from several launches: the worst, and of those that are fine the number to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from phases.common.case import Case, Finding, Unanswerable, incomplete
from runbook.records import Comparator, Outcome, Reason


def first_problem(
    answer: Callable[[Case, str], Finding], case: Case, names: Sequence[str]
) -> Finding:
    """The worst finding over several launches; PASS only if all pass.

    It has the number that is nearest to its limit, or the first where nothing limits it. A warning
    is worse than a plain PASS: it must not vanish behind one.
    """
    if not names:
        return incomplete(Reason.NOT_RUN, "no launch was planned")
    findings = [_caught(answer, case, name) for name in names]
    worst = min(findings, key=_order)
    if worst.outcome is not Outcome.PASS or worst.code is Reason.WARNING or len(findings) == 1:
        return worst
    paths = tuple(dict.fromkeys(path for found in findings for path in found.evidence))
    return replace(worst, reason=f"{len(findings)} launches: {worst.reason}", evidence=paths)


def _caught(answer: Callable[[Case, str], Finding], case: Case, name: str) -> Finding:
    try:
        return answer(case, name)
    except Unanswerable as unanswerable:
        return unanswerable.finding


def _order(found: Finding) -> tuple[int, bool, float]:
    """The worst outcome first, then warnings, then how far the number is from its limit."""
    return (found.outcome.rank, found.code is not Reason.WARNING, _room(found))


def _room(found: Finding) -> float:
    limit, measured = found.limit, found.measurement
    if measured is None or isinstance(limit, str | bool | None):
        return 0.0
    room = float(measured.value) - limit
    return room if found.comparator in (Comparator.AT_LEAST, Comparator.ABOVE) else -room
