"""The answer to one row's question, before it becomes a Check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from runbook.records import Comparator, Measurement, Outcome, Reason


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Outcome, closed reason code and a sentence; with the number and the limit if there is one.

    `topic` names the playbook entry that fixes it; the row's own topic is the default.
    """

    outcome: Outcome
    code: Reason
    reason: str
    measurement: Measurement | None = None
    comparator: Comparator = Comparator.NONE
    limit: float | str | bool | None = None
    limit_source: str = ""
    evidence: tuple[str, ...] = ()
    topic: str = ""


class Unanswerable(Exception):
    """Raised by a guard where a row's question has no answer; it holds what to say instead."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.reason)
        self.finding = finding


def _finding(
    outcome: Outcome,
    code: Reason,
    reason: str,
    measurement: Measurement | None,
    evidence: Iterable[str],
    topic: str = "",
) -> Finding:
    paths = dict.fromkeys(path for path in evidence if path)
    if measurement is not None:
        paths.setdefault(measurement.path)
    return Finding(
        outcome=outcome,
        code=code,
        reason=reason,
        measurement=measurement,
        evidence=tuple(paths),
        topic=topic,
    )


def passed(
    reason: str, *, measurement: Measurement | None = None, evidence: Iterable[str] = ()
) -> Finding:
    """The answer is yes."""
    return _finding(Outcome.PASS, Reason.OK, reason, measurement, evidence)


def warned(
    reason: str,
    *,
    measurement: Measurement | None = None,
    evidence: Iterable[str] = (),
    topic: str = "",
) -> Finding:
    """Nothing is wrong enough to stop, but a person should read it."""
    text = f"WARNING: {reason}"
    return _finding(Outcome.PASS, Reason.WARNING, text, measurement, evidence, topic)


def failed(
    code: Reason,
    reason: str,
    *,
    measurement: Measurement | None = None,
    evidence: Iterable[str] = (),
    topic: str = "",
) -> Finding:
    """A fault of the thing under test."""
    return _finding(Outcome.FAIL, code, reason, measurement, evidence, topic)


def invalid(
    code: Reason,
    reason: str,
    *,
    measurement: Measurement | None = None,
    evidence: Iterable[str] = (),
    topic: str = "",
) -> Finding:
    """Not comparable, not plausible, or the environment is wrong."""
    return _finding(Outcome.INVALID, code, reason, measurement, evidence, topic)


def incomplete(
    code: Reason, reason: str, *, evidence: Iterable[str] = (), topic: str = ""
) -> Finding:
    """No evidence: not run, or cut off."""
    return _finding(Outcome.INCOMPLETE, code, reason, None, evidence, topic)


def inconclusive(
    code: Reason,
    reason: str,
    *,
    measurement: Measurement | None = None,
    evidence: Iterable[str] = (),
    topic: str = "",
) -> Finding:
    """Measured, but not decidable at the declared error rate."""
    return _finding(Outcome.INCONCLUSIVE, code, reason, measurement, evidence, topic)


def skipped(
    code: Reason,
    reason: str,
    *,
    measurement: Measurement | None = None,
    evidence: Iterable[str] = (),
) -> Finding:
    """The question does not arise here; the reason says why."""
    return _finding(Outcome.SKIPPED, code, reason, measurement, evidence)
