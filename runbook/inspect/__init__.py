"""Read-only judgement of any run directory, ours or foreign."""

from __future__ import annotations

from runbook.inspect.folder import inspect_path
from runbook.inspect.text import inspection_text
from runbook.inspect.types import Code, Finding, Inspection, RunDirectory, jsonable

__all__ = [
    "Code",
    "Finding",
    "Inspection",
    "RunDirectory",
    "inspect_path",
    "inspection_text",
    "jsonable",
]
