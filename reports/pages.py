"""The Markdown and the HTML report: the shape of the best hand-written one, and what it lacked."""

from __future__ import annotations

import re
import shlex
from functools import lru_cache
from shlex import quote
from typing import TYPE_CHECKING

from reports.plots import figures
from reports.view import ReportView, build_view, one_line, value_text
from runbook.console import printable
from runbook.records import RunRecord
from runbook.records.measurement import duration_text, plain_number
from runbook.records.run import Report, Screen

if TYPE_CHECKING:
    from jinja2 import Environment

    from runbook.records import LaunchResult


_ENTITY = re.compile(r"&(?=#?\w+;)")
_MARKUP = re.compile(r"([\\`*|\[\]~$])")
_BLOCK_START = re.compile(r"^([0-9]*)([#>+=.)-])")
_LONE_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def markdown_cell(value: float | int | str | bool | None) -> str:
    """Text for a Markdown table cell or paragraph: one line, nothing in it acts as markup."""
    text = one_line(plain_number(value))
    text = _ENTITY.sub("&amp;", text).replace("<", "&lt;")
    text = _MARKUP.sub(r"\\\1", text)
    return _LONE_UNDERSCORE.sub(r"\\_", text)


def markdown_prose(value: str) -> str:
    """Text that begins a line or a list item: its first character must not start a block."""
    return _BLOCK_START.sub(r"\1\\\2", markdown_cell(value))


def markdown_code(value: str) -> str:
    """A code span that may stand in a table: pipes escaped, fence longer than any inside."""
    text = one_line(value)
    if not text:
        return ""
    ticks = "`" * (_longest_run(text) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text.replace('|', chr(92) + '|')}{pad}{ticks}"


def markdown_fence(value: str, language: str = "sh") -> str:
    """A fenced block, its fence longer than any run of backticks inside."""
    text = printable(value)
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}{language}\n{text}\n{ticks}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


@lru_cache(maxsize=1)
def markdown_environment() -> Environment:
    """Templates for Markdown; `cell`, `code` and `fence` escape, and everything is cleaned."""
    environment = _environment(html=False)
    environment.filters["cell"] = markdown_cell
    environment.filters["prose"] = markdown_prose
    environment.filters["code"] = markdown_code
    environment.filters["fence"] = markdown_fence
    return environment


@lru_cache(maxsize=1)
def html_environment() -> Environment:
    """Templates for HTML: autoescape is on, so that only our own plots are markup."""
    return _environment(html=True)


def _environment(*, html: bool) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from runbook.files import data_path

    environment = Environment(
        loader=FileSystemLoader(data_path("templates")),
        autoescape=html,  # noqa: S701 - Markdown has escapes of its own, HTML switches this on
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = lambda value: one_line(plain_number(value))
    environment.filters["line"] = one_line
    environment.filters["quote"] = quote
    environment.filters["seconds"] = duration_text
    environment.filters["value_text"] = value_text
    environment.filters["blame"] = blame
    return environment


def _finalize(value: object) -> object:
    """Clean whatever a template prints; text that is markup already was cleaned when made."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return printable(value)
    return value


def blame(result: LaunchResult) -> str:
    """Why a launch ended as it did, the rank to blame, and its notes; a dash if all is well."""
    rank = "" if result.culprit_rank is None else f" (rank {result.culprit_rank})"
    cause = [f"{result.cause}{rank}"] if result.cause else []
    return "; ".join([*cause, *(f"note: {note}" for note in result.notes)]) or "-"


def render_html(record: RunRecord, _: Screen) -> str:
    """Return `report.html`: no scripts, no network, light and dark, readable on a phone."""
    template = html_environment().get_template("report.html.j2")
    view = build_view(record)
    return template.render(
        run=record,
        view=view,
        exports=render_exports(record),
        longest_s=_longest(view),
        figures=figures(record),
    )


def _longest(view: ReportView) -> float:
    """The longest phase in seconds, never zero: bars are shares of it."""
    return max((phase.record.duration_s for phase in view.phases), default=0.0) or 1.0


def render_markdown(record: RunRecord, _: Screen) -> str:
    """Return `report.md`."""
    template = markdown_environment().get_template("report.md.j2")
    return template.render(run=record, view=build_view(record), exports=render_exports(record))


def render_exports(record: RunRecord) -> str:
    """`export NAME=value` lines that a shell takes as they are."""
    return "\n".join(f"export {name}={shlex.quote(text)}" for name, text in record.exports.items())


HTML = Report(file_name="report.html", render=render_html)
MARKDOWN = Report(file_name="report.md", render=render_markdown)
