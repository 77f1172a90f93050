"""Read-only judgement of any run directory, ours or foreign."""

from __future__ import annotations

from runbook.tools.inspect.folder import inspect_path
from runbook.tools.inspect.types import Inspection, inspection_text

__all__ = ["Inspection", "inspect_path", "inspection_text"]
