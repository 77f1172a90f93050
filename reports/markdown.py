"""Text that is safe in Markdown: in a table's cell, at the start of a line, as code."""

from __future__ import annotations

import re

from reports.view import one_line, shown_value
from runbook.text import printable

_ENTITY = re.compile(r"&(?=#?\w+;)")
_MARKUP = re.compile(r"([\\`*|\[\]~$])")
_BLOCK_START = re.compile(r"^([0-9]*)([#>+=.)-])")
_LONE_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def markdown_cell(value: float | int | str | bool | None) -> str:
    """Text for a Markdown table cell or paragraph: one line, nothing in it acts as markup."""
    text = _ENTITY.sub("&amp;", shown_value(value)).replace("<", "&lt;")
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


def markdown_told(value: str) -> str:
    """A sentence in which what stands between backticks is code."""
    parts = one_line(value).split("`")
    if len(parts) % 2 == 0:  # half a code span
        return markdown_prose(value)
    text = "".join(
        markdown_code(part) if place % 2 else _between(part) for place, part in enumerate(parts)
    )
    return _BLOCK_START.sub(r"\1\\\2", text)


def _between(text: str) -> str:
    """Text beside a code span: one blank stays at either end."""
    inner = markdown_cell(text)
    before, after = (" " if end.isspace() else "" for end in (text[:1], text[-1:]))
    return f"{before}{inner}{after}" if inner else before


def markdown_fence(value: str, language: str = "sh") -> str:
    """A fenced block, its fence longer than any run of backticks inside."""
    text = printable(value)
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}{language}\n{text}\n{ticks}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)
