"""The launcher: starts trainers and tests, watches them, ends them, and says how they ended.

Nothing else starts a launch; code belongs here if it needs a live process or its run directory.
"""

from __future__ import annotations

from runbook.launch.launcher import adopt_launch, run_launch, set_aside
from runbook.launch.observer import Interrupted, StopRequest, stop_on_signals
from runbook.launch.supervision import LaunchOptions
from runbook.launch.watch.watchdog import Budgets

__all__ = [
    "Budgets",
    "Interrupted",
    "LaunchOptions",
    "StopRequest",
    "adopt_launch",
    "run_launch",
    "set_aside",
    "stop_on_signals",
]
