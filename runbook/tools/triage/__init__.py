"""The failing command again, with one change at a time, until the failure goes away.

What is triaged (`target`), the changes as data (`steps`), and running them (`runner`); a new change
is one entry of `STEPS`, and nothing here judges a run.
"""

from __future__ import annotations

from runbook.tools.triage.runner import StepResult, Triage, run_steps
from runbook.tools.triage.steps import STEPS, TriageStep, applied
from runbook.tools.triage.target import Target, find_target, with_choices

__all__ = [
    "STEPS", "StepResult", "Target", "Triage", "TriageStep", "applied", "find_target", "run_steps",
    "with_choices",
]  # fmt: skip
