"""The environments of the templates: what they find, how they write values, what they escape."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from reports.view import shown_value, value_text
from runbook.records.measurement import duration_text
from runbook.text import printable, short_caveat

if TYPE_CHECKING:
    from jinja2 import Environment

    from runbook.records import LaunchResult


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
    environment.filters["number"] = shown_value
    environment.filters["quote"] = quote
    environment.filters["seconds"] = duration_text
    environment.filters["value_text"] = value_text
    environment.filters["blame"] = blame
    environment.filters["short_caveat"] = short_caveat
    environment.filters["sentence"] = sentence
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
