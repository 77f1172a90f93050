"""Finished runs, recomputed: `verify_run` compares, `judge_again` uses other limits."""

from __future__ import annotations

from runbook.verify.again import judge_again
from runbook.verify.verifying import Verification, verify_run

__all__ = ["Verification", "judge_again", "verify_run"]
