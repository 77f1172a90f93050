"""The engine: runs a plan and leaves a record. Never imports torch.

Its names are loaded when they are asked for: a report of a finished run needs only
`runbook.engine.outputs`, not the statistics that judging a new one does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runbook.config.setup import RunOptions
    from runbook.engine.plan.prepare import plan_all
    from runbook.engine.resuming import resume_run
    from runbook.engine.run import run_plan
    from runbook.launch.observer import Observer

__all__ = ["Observer", "RunOptions", "plan_all", "resume_run", "run_plan"]

_HOMES = {
    "Observer": "runbook.launch.observer",
    "RunOptions": "runbook.config.setup",
    "plan_all": "runbook.engine.plan.prepare",
    "resume_run": "runbook.engine.resuming",
    "run_plan": "runbook.engine.run",
}


def __getattr__(name: str) -> Any:
    """The name from the module that owns it. Raises AttributeError for any other."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
