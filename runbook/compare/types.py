"""What a comparison of two finished runs says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from runbook.decide import Decision

__all__ = ["CheckChange", "Comparison", "Difference", "SpeedChange", "jsonable"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that is not the same on both sides.

    `kind` groups what changes together: code, machine, software, work (profile, config, data
    shapes), toggles or harness. Numbers may be compared only if one kind differs, and not work.
    """

    kind: str
    what: str
    a: str
    b: str


@dataclass(frozen=True, kw_only=True)
class CheckChange:
    """One check on both sides; an absent side is an empty outcome."""

    id: str
    required: bool
    a: str
    b: str
    a_value: str
    b_value: str

    @property
    def worse(self) -> bool:
        """True if it passed in A and does not in B."""
        return self.a == "PASS" and self.b != "PASS"

    @property
    def changed(self) -> bool:
        """True if the outcome is another."""
        return self.a != self.b


@dataclass(frozen=True, kw_only=True)
class SpeedChange:
    """Throughput of one phase's launches on both sides, in toks/s, and the decision if any."""

    phase: str
    launches: tuple[str, ...]
    a: tuple[float, ...]
    b: tuple[float, ...]
    ratio: float
    decision: Decision | None
    note: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Run A (the reference) against run B."""

    a: str
    b: str
    a_verdict: str
    b_verdict: str
    differences: tuple[Difference, ...]
    obstacles: tuple[str, ...]
    checks: tuple[CheckChange, ...]
    speeds: tuple[SpeedChange, ...]

    @property
    def comparable(self) -> bool:
        """True if a difference in the numbers can be ascribed to one cause."""
        return not self.obstacles

    @property
    def exit_code(self) -> int:
        """0 nothing is worse, 1 a required check or the speed is, 3 it cannot be said."""
        if not self.comparable:
            return 3
        outcomes = {one.decision.outcome.value for one in self.speeds if one.decision}
        if "FAIL" in outcomes or any(check.worse and check.required for check in self.checks):
            return 1
        return 3 if "INCONCLUSIVE" in outcomes else 0


def jsonable(comparison: Comparison) -> dict[str, Any]:
    """The comparison as a JSON document."""
    document = asdict(comparison)
    for one, speed in zip(document["speeds"], comparison.speeds, strict=True):
        one["decision"] = speed.decision.to_dict() if speed.decision else None
    for one, check in zip(document["checks"], comparison.checks, strict=True):
        one["worse"] = check.worse
    head = {"schema_version": 1, "exit_code": comparison.exit_code}
    return {**head, "comparable": comparison.comparable, **document}
