"""Read-only judgement of any run directory, ours or foreign."""

from __future__ import annotations

from runbook.tools.inspect.folder import inspect_path, inspection_text
from runbook.tools.inspect.types import Code, Finding, Inspection, RunDirectory

__all__ = [
    "Code",
    "Finding",
    "Inspection",
    "RunDirectory",
    "inspect_path",
    "inspection_text",
]
