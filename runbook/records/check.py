"""One row of the acceptance table."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from runbook.records.measurement import Measurement, Record, Scalar
from runbook.records.outcome import Outcome, Reason


class Comparator(StrEnum):
    """How the value is held against the limit."""

    AT_LEAST = ">="
    ABOVE = ">"
    AT_MOST = "<="
    BELOW = "<"
    EQUALS = "=="
    IS_TRUE = "is true"
    NONE = ""


class Check(Record):
    """A question, what was measured, the limit with its source, and what follows.

    An outcome other than PASS or SKIPPED must name a remedy; only a measured value can PASS
    against a numeric limit.
    """

    id: str = Field(pattern=r"^[a-z0-9_]+\.[a-z0-9_.]+$")
    phase: str
    question: str
    measurement: Measurement | None = None
    comparator: Comparator = Comparator.NONE
    limit: Scalar | None = None
    limit_source: str = ""
    outcome: Outcome
    code: Reason
    reason: str = Field(min_length=1)
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    rerun: str = ""
    required: bool = False

    @model_validator(mode="after")
    def _honest(self) -> Check:
        if not self.id.startswith(f"{self.phase}."):
            raise ValueError(f"check {self.id!r} does not begin with its phase {self.phase!r}")
        if self.outcome is Outcome.PASS and self.limit is not None and self.measurement is None:
            raise ValueError(f"check {self.id!r} cannot pass a limit without a measurement")
        if self.limit is not None and not self.limit_source:
            raise ValueError(f"check {self.id!r} has a limit without its source")
        if self.outcome not in (Outcome.PASS, Outcome.SKIPPED) and not self.remedy:
            raise ValueError(f"check {self.id!r} is {self.outcome} without saying what to do")
        return self
