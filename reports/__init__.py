"""Run record in, text out. Nothing here measures or judges.

`render` and `write` are the whole interface; each format is one small module.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.errors import UsageError, did_you_mean
from runbook.files import write_atomic

if TYPE_CHECKING:
    from runbook.records import RunRecord

__distribution__ = "nsa-runbook"

__all__ = ["FILE_NAMES", "FORMATS", "render", "write"]

FILE_NAMES = {
    "md": "report.md",
    "html": "report.html",
    "junit": "junit.xml",
    "json": "report.json",
    "terminal": "report.txt",
}
FORMATS = tuple(FILE_NAMES)


def render(record: RunRecord, fmt: str, *, color: bool = False, location: str = "") -> str:
    """Return the record in one of FORMATS, a function of the record alone.

    `color` and `location` (the run's folder as the reader types it) matter to "terminal" only.
    Raises UsageError for an unknown format.
    """
    _refuse_unknown([fmt])
    if fmt == "md":
        from reports.pages import render_markdown

        return render_markdown(record)
    if fmt == "html":
        from reports.pages import render_html

        return render_html(record)
    if fmt == "junit":
        from reports.junit import render_junit

        return render_junit(record)
    if fmt == "json":
        from reports.json_report import render_json

        return render_json(record)
    from reports.terminal import render_terminal

    return render_terminal(record, color=color, location=location)


def write(record: RunRecord, run_root: Path, formats: Iterable[str]) -> list[Path]:
    """Write the reports into the run's folder, each replaced at once, and return their paths.

    Everything is rendered before the first file changes. Raises UsageError for unknown formats.
    """
    wanted = list(dict.fromkeys(formats))
    _refuse_unknown(wanted)
    texts = {run_root / FILE_NAMES[fmt]: render(record, fmt) for fmt in wanted}
    for path, text in texts.items():
        write_atomic(path, text)
    return list(texts)


def _refuse_unknown(formats: list[str]) -> None:
    unknown = [fmt for fmt in formats if fmt not in FILE_NAMES]
    if unknown:
        problems = [f"unknown report format {fmt!r}{did_you_mean(fmt, FORMATS)}" for fmt in unknown]
        raise UsageError(problems, hint=f"formats are {', '.join(FORMATS)}")
