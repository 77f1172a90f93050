"""Decisions at a declared error rate. Pure functions: no files, no clock, no randomness.

One value is the throughput of one block or launch, tokens / time; never a mean of rates.
"""

from __future__ import annotations

from runbook.decide._rounds import complete_rounds
from runbook.decide.arms import best_arm, best_arm_sequential
from runbook.decide.launches import SCALING_PLAN, meets_target, scaling
from runbook.decide.memory import memory_plateau
from runbook.decide.pairs import FUSED_PLAN, faster, non_inferiority, regression
from runbook.decide.plan import BUCKET_PLAN, LookPlan
from runbook.decide.steady import steady, warmup_steps
from runbook.decide.types import Answer, Decision, Detail

__all__ = [
    "BUCKET_PLAN",
    "FUSED_PLAN",
    "SCALING_PLAN",
    "Answer",
    "Decision",
    "Detail",
    "LookPlan",
    "best_arm",
    "best_arm_sequential",
    "complete_rounds",
    "faster",
    "meets_target",
    "memory_plateau",
    "non_inferiority",
    "regression",
    "scaling",
    "steady",
    "warmup_steps",
]
