"""Forms of heartbeat lines: most lines differ from others in nothing but their numbers.

A form is learned from one line that was parsed as JSON: its text with holes for the numbers and the
digest of the data. `columns` reads lines of known forms without parsing each of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Who speaks, and of what: always part of the form.
_SAME = frozenset({"event", "phase", "token", "rank", "pid"})
COUNTER, CLOCKS, DIGEST = "step", ("mono", "ts"), "data"
_FIELD = re.compile(
    rb'\s*"(?P<key>[^"\\]*)"\s*:\s*'
    rb'(?:(?P<number>[0-9][0-9.eE+-]*)|(?P<text>"[^"\\]*")|(?P<word>null|true|false))(?P<end>[,}])'
)
DIGEST_TEXT = re.compile(r"[0-9a-fA-F]{1,16}")


@dataclass(frozen=True, kw_only=True)
class Hole:
    """A place in a line whose content may differ.

    It begins behind the text `before`, and ends after `length` bytes, at the comma of that number
    in the line, or where the form's text `after` begins: whichever is there.
    """

    name: str
    before: bytes
    length: int | None = None
    comma: int | None = None


@dataclass(frozen=True, kw_only=True)
class Form:
    """Lines that say the same as `record` but for the holes; `after` ends with the newline."""

    record: Mapping[str, Any]
    holes: tuple[Hole, ...]
    after: bytes
    commas: int


def form_of(line: bytes, fits: Callable[[Mapping[str, Any]], bool]) -> Form | None:
    """The form of a line (without its newline), or None if it has none.

    It has none if `fits` says no of its record, if it is not flat ASCII without escapes, or if
    step or a clock is no plain number.
    """
    try:
        record = json.loads(line) if line.isascii() else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not fits(record):
        return None
    fields = list(_fields(line))
    names = [field["key"].decode() for field in fields]
    if len(set(names)) < len(names) or set(names) != set(record):
        return None
    holes: list[Hole] = []
    cut = 0
    for name, field in zip(names, fields, strict=True):
        if name in _SAME:
            continue
        if field["number"]:
            begin, end = field.span("number")
            comma = line.count(b",", 0, end) if field["end"] == b"," else None
            holes.append(Hole(name=name, before=line[cut:begin], comma=comma))
            cut = end
        elif name == DIGEST and field["text"] and DIGEST_TEXT.fullmatch(record[name]):
            begin, end = field.start("text") + 1, field.end("text") - 1
            holes.append(Hole(name=name, before=line[cut:begin], length=end - begin))
            cut = end
    if not {COUNTER, *CLOCKS} <= {hole.name for hole in holes}:
        return None
    after = line[cut:] + b"\n"
    return Form(record=record, holes=tuple(holes), after=after, commas=line.count(b","))


def _fields(line: bytes) -> Iterator[re.Match[bytes]]:
    """The fields of a flat object, as far as they are plain."""
    at = line.find(b"{") + 1
    while field := _FIELD.match(line, at):
        yield field
        if field["end"] == b"}":
            return
        at = field.end()
