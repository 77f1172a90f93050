"""The Markdown report: the shape of the seeds' best report, with the facts it lacked."""

from __future__ import annotations

import shlex

from reports.templating import markdown_environment
from reports.view import build_view
from runbook.records import RunRecord

__all__ = ["render_exports", "render_markdown"]


def render_markdown(record: RunRecord) -> str:
    """Return `report.md`."""
    template = markdown_environment().get_template("report.md.j2")
    return template.render(run=record, view=build_view(record), exports=render_exports(record))


def render_exports(record: RunRecord) -> str:
    """`export NAME=value` lines that a shell takes as they are."""
    return "\n".join(f"export {name}={shlex.quote(text)}" for name, text in record.exports.items())
