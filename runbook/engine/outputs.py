"""Reports that follow from a run's record."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from runbook import registry
from runbook.errors import UsageError, did_you_mean
from runbook.files import write_atomic
from runbook.records import RunRecord
from runbook.records.run import Screen
from runbook.registry import report_files


def format_problems(names: Iterable[str]) -> list[str]:
    """One sentence for each name that is no report format."""
    known = registry.report_names()
    return [
        f"{name!r}: no such format{did_you_mean(name, known)}; there are: {', '.join(known)}"
        for name in names
        if name not in known
    ]


def render(record: RunRecord, name: str, screen: Screen | None = None) -> str:
    """The record in one format, a function of the record alone. Raises UsageError."""
    if problems := format_problems([name]):
        raise UsageError(problems)
    return registry.reports()[name].text(record, screen)


def write_reports(record: RunRecord, run_root: Path, names: Iterable[str]) -> list[Path]:
    """Write the reports into the run's folder, each replaced at once, and return their paths.

    Everything is rendered before the first file changes. Raises UsageError for unknown formats.
    """
    wanted = list(dict.fromkeys(names))
    if problems := format_problems(wanted):
        raise UsageError(problems)
    files = report_files()
    texts = {run_root / files[name]: render(record, name) for name in wanted}
    for path, text in texts.items():
        write_atomic(path, text)
    return list(texts)
