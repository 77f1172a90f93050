"""Fire drills: real faults in real runs, and whether they are noticed as promised."""

from __future__ import annotations

from runbook.drill.faults import FAULTS, Fault, select
from runbook.drill.runner import DrillReport, run_drill
from runbook.drill.verdict import DrillRow

__all__ = ["FAULTS", "DrillReport", "DrillRow", "Fault", "run_drill", "select"]
