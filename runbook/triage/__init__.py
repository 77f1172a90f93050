"""The operator's ladder: one change at a time, for real, until the failure goes away."""

from __future__ import annotations

from runbook.triage.climb import RungResult, Triage, climb
from runbook.triage.ladder import LADDERS, Rung, applied
from runbook.triage.target import Target, find_target, with_choices

__all__ = [
    "LADDERS", "Rung", "RungResult", "Target", "Triage", "applied", "climb", "find_target",
    "with_choices",
]  # fmt: skip
