"""The operator's ladder: one change at a time, for real, until the failure goes away."""

from __future__ import annotations

from runbook.tools.triage.bisect import RungResult, Triage, climb
from runbook.tools.triage.ladder import LADDERS, Rung, applied
from runbook.tools.triage.target import Target, find_target, with_choices

__all__ = [
    "LADDERS", "Rung", "RungResult", "Target", "Triage", "applied", "climb", "find_target",
    "with_choices",
]  # fmt: skip
