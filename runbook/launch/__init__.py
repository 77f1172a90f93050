"""The launcher: the only package that starts trainers and tests, and it owns what it starts."""

from __future__ import annotations

from runbook.launch.launcher import run_launch
from runbook.launch.stop import Interrupted, StopRequest, stop_on_signals
from runbook.launch.watchdog import Budgets

__all__ = ["Budgets", "Interrupted", "StopRequest", "run_launch", "stop_on_signals"]
