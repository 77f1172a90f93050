"""The engine: runs a plan and leaves a record. Never imports torch."""

from __future__ import annotations

from runbook.engine.options import RunOptions, plan_all
from runbook.engine.run import resume_run, run_plan
from runbook.launch.observer import Observer

__all__ = ["Observer", "RunOptions", "plan_all", "resume_run", "run_plan"]
