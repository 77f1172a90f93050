"""How every format writes checks, values and text, and the environments of the templates.

Text is made safe in Markdown: in a table's cell, at the start of a line, as code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from shlex import quote
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from runbook.errors import printable, short_caveat
from runbook.records import Check, Comparator, LaunchResult, Measurement, Outcome, Reason
from runbook.records.measurement import duration_text, plain_number

if TYPE_CHECKING:
    from jinja2 import Environment

_DIGEST = re.compile(r"[0-9a-f]{64}")
_ENTITY = re.compile(r"&(?=#?\w+;)")
_MARKUP = re.compile(r"([\\`*|\[\]~$])")
_BLOCK_START = re.compile(r"^([0-9]*)([#>+=.)-])")
_LONE_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def export_line(variables: Mapping[str, str]) -> str:
    """One line for a shell that sets them."""
    return "export " + " ".join(f"{name}={quote(value)}" for name, value in variables.items())


def check_value(check: Check) -> str:
    """The number; a bare yes or no that no limit explains has its name: `git.dirty: no`."""
    measured = check.measurement
    if measured is None:
        return ""
    bare = isinstance(measured.value, bool) and check.comparator is Comparator.NONE
    return f"{one_line(measured.name)}: {value_text(measured)}" if bare else value_text(measured)


def shown_value(value: float | int | str | bool | None) -> str:
    """A value on one line; a digest is for programs, so that a page only says where it is."""
    text = one_line(plain_number(value))
    return "digest in run.json" if _DIGEST.fullmatch(text) else text


def value_text(measured: Measurement) -> str:
    """`847.2 ± 4.1 tok/s, interval 840 to 852`."""
    text = shown_value(measured.value)
    if measured.stdev is not None:
        text += f" ± {plain_number(measured.stdev)}"
    if measured.unit:
        text += f" {one_line(measured.unit)}"
    if measured.interval is not None:
        low, high = measured.interval
        text += f", interval {plain_number(low)} to {plain_number(high)}"
    return text


def limit_text(check: Check) -> str:
    """`>= 39 tok/s`, or an empty text where nothing limits the value."""
    if check.comparator is Comparator.IS_TRUE:
        return check.comparator.value
    if check.limit is None:
        return ""
    unit = one_line(check.measurement.unit) if check.measurement else ""
    words = (check.comparator.value, one_line(plain_number(check.limit)), unit)
    return " ".join(word for word in words if word)


NOT_GATED_WORDS = "not gated"


def bound_text(check: Check) -> str:
    """The limit, or that a number passes which decided nothing."""
    shown = check.outcome is Outcome.PASS and check.code is Reason.NOT_GATED
    return NOT_GATED_WORDS if shown else limit_text(check)


def one_line(text: str) -> str:
    """The printable text on one line, runs of white space as one blank."""
    return " ".join(printable(text).split())


@lru_cache(maxsize=2)
def template_environment(*, html: bool) -> Environment:
    """Templates with the filters that all formats share; HTML escapes whatever it prints."""
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
    environment.filters |= {
        "number": shown_value,
        "seconds": duration_text,
        "value_text": value_text,
        "shown": check_value,
        "bound": bound_text,
        "blame": blame,
        "short_caveat": short_caveat,
        "sentence": sentence,
        **({"told": html_told} if html else _MARKDOWN),
    }
    return environment


def sentence(text: str) -> str:
    """The text with a capital letter first, if it begins with a word and not with a name."""
    first = text.partition(" ")[0].rstrip(",:")
    return text[:1].upper() + text[1:] if first.isalpha() and first.islower() else text


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
    text = "".join(_spans(one_line(value), _between, markdown_code))
    return _BLOCK_START.sub(r"\1\\\2", text)


def _spans(text: str, plain: Callable[[str], str], code: Callable[[str], str]) -> list[str]:
    """The text in parts, what stands between backticks as code; all plain if one is left over."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return [plain(text)]
    return [code(part) if place % 2 else plain(part) for place, part in enumerate(parts)]


def _between(text: str) -> str:
    """Text beside a code span: one blank stays at either end."""
    inner = markdown_cell(text)
    before, after = (" " if end.isspace() else "" for end in (text[:1], text[-1:]))
    return f"{before}{inner}{after}" if inner else before


def markdown_fence(value: str) -> str:
    """A fenced block, its fence longer than any run of backticks inside."""
    text = printable(value)
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}sh\n{text}\n{ticks}"


def html_told(value: str) -> Markup:
    """A sentence in which what stands between backticks is code."""
    return Markup("").join(_spans(printable(value), escape, Markup("<code>{}</code>").format))


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


# Filters that escape; everything else is cleaned as it is printed.
_MARKDOWN = {
    "cell": markdown_cell,
    "prose": markdown_prose,
    "code": markdown_code,
    "fence": markdown_fence,
    "told": markdown_told,
}
