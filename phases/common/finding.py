"""The answer to one row's question, before it becomes a Check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

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
    *,
    measurement: Measurement | None = None,
    evidence: Iterable[str] = (),
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


def warned(
    reason: str,
    *,
    measurement: Measurement | None = None,
    evidence: Iterable[str] = (),
    topic: str = "",
) -> Finding:
    """Nothing is wrong enough to stop, but a person should read it."""
    return _finding(
        Outcome.PASS,
        Reason.WARNING,
        f"WARNING: {reason}",
        measurement=measurement,
        evidence=evidence,
        topic=topic,
    )


# The answer is yes.
passed = partial(_finding, Outcome.PASS, Reason.OK)
# A fault of the thing under test.
failed = partial(_finding, Outcome.FAIL)
# Not comparable, not plausible, or the environment is wrong.
invalid = partial(_finding, Outcome.INVALID)
# No evidence: not run, or cut off.
incomplete = partial(_finding, Outcome.INCOMPLETE)
# Measured, but not decidable at the declared error rate.
inconclusive = partial(_finding, Outcome.INCONCLUSIVE)
# The question does not arise here; the reason says why.
skipped = partial(_finding, Outcome.SKIPPED)
