"""Compare two finished runs."""

from __future__ import annotations

from runbook.compare.runs import compare_runs
from runbook.compare.text import comparison_text
from runbook.compare.types import CheckChange, Comparison, Difference, SpeedChange, jsonable

__all__ = [
    "CheckChange",
    "Comparison",
    "Difference",
    "SpeedChange",
    "compare_runs",
    "comparison_text",
    "jsonable",
]
