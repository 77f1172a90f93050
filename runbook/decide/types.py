"""The one result type of every decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Answer", "Decision", "Detail"]

Detail = str | int | float | bool | None | list["Detail"] | dict[str, "Detail"]


class Answer(StrEnum):
    """What a decision can say. WINNER, TIE, KEEP and DROP are answers to a question of choice."""

    WINNER = "WINNER"
    TIE = "TIE"
    KEEP = "KEEP"
    DROP = "DROP"
    PASS = "PASS"  # noqa: S105 - a verdict, not a secret
    FAIL = "FAIL"
    INVALID = "INVALID"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def as_check(self) -> str:
        """The outcome of the check that asked: PASS, FAIL, INVALID or INCONCLUSIVE.

        A choice that could be made (WINNER, TIE, KEEP, DROP) answers its question: PASS.
        """
        if self in (Answer.WINNER, Answer.TIE, Answer.KEEP, Answer.DROP):
            return Answer.PASS.value
        return self.value


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An answer with the evidence for it.

    Attributes:
        outcome: the answer.
        winner: the arm to use, only with WINNER.
        estimate: the estimated quantity, in `unit`; None where there is too little data.
        interval: lower and upper bound; each is one-sided at `error_rate` unless the function
            says otherwise, so together they make a 1 - 2 * error_rate interval.
        error_rate: the declared chance of the wrong answer at the limit in question.
        n: independent units of evidence (rounds, launches, pairs, batches or rows).
        unit: unit of estimate and interval ("ratio", "tok/s", "share", "MiB").
        reason: one sentence for people.
        go_on: True if more data of the same plan is to be taken before the answer is final.
        details: further numbers, JSON-able.
    """

    outcome: Answer
    winner: str | None = None
    estimate: float | None = None
    interval: tuple[float, float] | None = None
    error_rate: float
    n: int
    unit: str
    reason: str
    go_on: bool = False
    details: Mapping[str, Detail] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Detail]:
        """A plain dictionary that `json.dumps` takes as it is."""
        return {
            "outcome": self.outcome.value,
            "winner": self.winner,
            "estimate": self.estimate,
            "interval": None if self.interval is None else list(self.interval),
            "error_rate": self.error_rate,
            "n": self.n,
            "unit": self.unit,
            "reason": self.reason,
            "go_on": self.go_on,
            "details": dict(self.details),
        }
