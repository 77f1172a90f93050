"""Read-only judgement of any run directory, ours or foreign."""

from __future__ import annotations

from runbook.tools.inspect.folder import inspect_path, inspection_text
from runbook.tools.inspect.types import Inspection, Remark, RemarkCode, RunDirectory

__all__ = [
    "Inspection",
    "Remark",
    "RemarkCode",
    "RunDirectory",
    "inspect_path",
    "inspection_text",
]
