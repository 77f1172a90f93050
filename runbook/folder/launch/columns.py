"""Heartbeat lines as columns: what a parser of JSON would find in them, without an object a line.

Most lines differ from others in nothing but their numbers. A form is learned from one line that
was parsed as JSON: its text with holes for the numbers and the digest of the data. A line is of a
form only if all of its text around the holes is the same to the byte, each number is one that JSON
allows, and Python's `float` reads it. All other lines are left to the parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from runbook.folder.launch.shapes import DIGEST_TEXT

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Texts = npt.NDArray[np.bytes_]

_NEWLINE, _COMMA, _ZERO, _NINE, _DOT = b"\n,09."
# A whole number of 15 digits is exact in a float64; one of 20 may not fit into 64 bits.
_EXACT, _SAFE, _LONGEST = 15, 19, 24
_HEX = np.isin(np.arange(256), np.frombuffer(b"0123456789abcdefABCDEF", np.uint8))
_MOST_FORMS = 32
# So many lines make a form worth knowing, and so few others make a block worth reading by forms.
_WORTH, _OTHERS_SHARE = 64, 0.01
# Who speaks, and of what: always part of the form.
_SAME = frozenset({"event", "phase", "token", "rank", "pid"})
COUNTER, CLOCKS, DIGEST = "step", ("mono", "ts"), "data"
_FIELD = re.compile(
    rb'\s*"(?P<key>[^"\\]*)"\s*:\s*'
    rb'(?:(?P<number>[0-9][0-9.eE+-]*)|(?P<text>"[^"\\]*")|(?P<word>null|true|false))(?P<end>[,}])'
)


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
    for name, told in zip(names, fields, strict=True):
        if name in _SAME:
            continue
        if told["number"]:
            begin, end = told.span("number")
            comma = line.count(b",", 0, end) if told["end"] == b"," else None
            holes.append(Hole(name=name, before=line[cut:begin], comma=comma))
            cut = end
        elif name == DIGEST and told["text"] and DIGEST_TEXT.fullmatch(record[name]):
            begin, end = told.start("text") + 1, told.end("text") - 1
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


@dataclass(kw_only=True)
class Columns:
    """The lines of one block: the number of each line's form, and -1 where it is of none.

    `numbers` are the fields of lines that have them, NaN in all others; `digests` likewise, empty.
    """

    block: bytes
    starts: Ints
    ends: Ints
    form: Ints
    forms: tuple[Form, ...] = ()
    numbers: dict[str, Floats] = field(default_factory=dict)
    digests: Texts | None = None

    def line(self, number: int) -> bytes:
        """One line without its newline."""
        return self.block[self.starts[number] : self.ends[number]]

    def number(self, name: str) -> Floats:
        """The column of a field; NaN throughout if no line has it."""
        if name not in self.numbers:
            self.numbers[name] = np.full(len(self.ends), np.nan)
        return self.numbers[name]

    def digest(self) -> Texts:
        """The column of digests."""
        if self.digests is None:
            self.digests = np.zeros(len(self.ends), dtype="S16")
        return self.digests

    def texts(self, lines: slice, chosen: Bools) -> list[str | None]:
        """The digests of some of these lines, None where there is none."""
        digests = self.digest()[lines][chosen]
        return [text or None for text in digests.astype(str).tolist()]

    def forms_in(self, lines: slice) -> list[tuple[Form, int]]:
        """The forms of these lines in the order of their first ones, and how many have them."""
        own = self.form[lines]
        counts = np.bincount(own)
        found = sorted((int(np.argmax(own == n)), n) for n in np.flatnonzero(counts).tolist())
        return [(self.forms[number], int(counts[number])) for _, number in found]

    def each(self, lines: slice, say: Callable[[Mapping[str, Any]], Any]) -> npt.NDArray[Any]:
        """For each of these lines what `say` says of its form's record."""
        return np.array([say(form.record) for form in self.forms])[self.form[lines]]

    def pieces(self) -> Iterator[slice | int]:
        """All lines in their order: slices of lines that have forms, numbers of those without."""
        begin = 0
        for other in [*np.flatnonzero(self.form < 0).tolist(), len(self.form)]:
            if begin < other:
                yield slice(begin, other)
            if other < len(self.form):
                yield other
            begin = other + 1


class Forms:
    """The forms that lines of one file have had so far; `fits` as for `form_of`."""

    def __init__(self, fits: Callable[[Mapping[str, Any]], bool]) -> None:
        self._known: list[Form] = []
        self._fits = fits

    def columns(self, block: bytes) -> Columns | None:
        """A block of whole lines, or None where too many of them are of no form."""
        text = _Text(block)
        lines = len(text.ends)
        none = np.full(lines, -1)
        found = Columns(block=block, starts=text.starts, ends=text.ends, form=none)
        left = np.arange(lines)
        for number, form in enumerate(self._known):
            _take(text, found, form, number, left)
            left = left[found.form[left] < 0]
        for _ in range(_MOST_FORMS - len(self._known)):
            if len(left) >= _WORTH:
                left = self._learn(text, found, left)
        found.forms = tuple(self._known)
        return found if np.count_nonzero(found.form < 0) <= lines * _OTHERS_SHARE else None

    def _learn(self, text: _Text, found: Columns, left: Ints) -> Ints:
        """Take lines like the one in the middle if they are many; leave that one alone if not."""
        middle = len(left) // 2
        form = form_of(found.line(left[middle]), self._fits)
        if form is None or _take(text, found, form, len(self._known), left, _WORTH) < _WORTH:
            return np.delete(left, middle)
        self._known.append(form)
        return left[found.form[left] < 0]


def _take(text: _Text, found: Columns, form: Form, number: int, left: Ints, least: int = 1) -> int:
    """Fill in the lines of one form if there are so many at least; returns how many there are."""
    lines, spans = text.like(form, left)
    if len(lines) < least:
        return 0
    numbers: dict[str, Floats] = {}
    for hole, (begin, end) in zip(form.holes, spans, strict=True):
        if hole.length is None:
            values = text.numbers(begin, end, whole=hole.name == COUNTER)
            if values is None:
                return 0
            numbers[hole.name] = values
    for name, values in numbers.items():
        found.number(name)[lines] = values
    for hole, (begin, end) in zip(form.holes, spans, strict=True):
        if hole.name == DIGEST:
            found.digest()[lines] = text.cut(begin, end).view(f"S{hole.length}")[:, 0]
    found.form[lines] = number
    return len(lines)


class _Text:
    """A block of lines, and where its commas are."""

    def __init__(self, block: bytes) -> None:
        # What is cut out at a place near the end may reach behind it.
        self._bytes = np.frombuffer(block + bytes(_LONGEST), dtype=np.uint8)
        self._plain = b"\0" not in block
        # Newlines are among the commas, so that one search finds both and tells whose they are.
        self._commas = np.flatnonzero((self._bytes == _COMMA) | (self._bytes == _NEWLINE))
        last = np.flatnonzero(self._bytes[self._commas] == _NEWLINE)
        self.ends: Ints = self._commas[last]
        self.starts: Ints = np.concatenate([[0], self.ends[:-1] + 1])
        self._first_comma: Ints = np.concatenate([[0], last[:-1] + 1])
        self._comma_count = last - self._first_comma

    def like(self, form: Form, lines: Ints) -> tuple[Ints, list[tuple[Ints, Ints]]]:
        """Those of the lines whose text around the holes is the form's, and where the holes are."""
        lines = lines[self._comma_count[lines] == form.commas] if self._plain else lines[:0]
        place = self.starts[lines]
        spans: list[tuple[Ints, Ints]] = []
        for hole in form.holes:
            good = self._says(hole.before, place)
            begin = place + len(hole.before)
            end = self._end(form, hole, lines, begin)
            good &= (end > begin) & (end - begin <= _LONGEST)
            if hole.length is not None and good.any():
                good[good] = _HEX[self.cut(begin[good], end[good])].all(axis=1)
            if not good.all():
                lines, begin, end = lines[good], begin[good], end[good]
                spans = [(one[good], other[good]) for one, other in spans]
            spans.append((begin, end))
            place = end
        good = self._says(form.after, place) & (place + len(form.after) == self.ends[lines] + 1)
        return lines[good], [(begin[good], end[good]) for begin, end in spans]

    def _end(self, form: Form, hole: Hole, lines: Ints, begin: Ints) -> Ints:
        if hole.length is not None:
            return begin + hole.length
        if hole.comma is not None:
            return self._commas[self._first_comma[lines] + hole.comma]
        return self.ends[lines] + 1 - len(form.after)

    def _says(self, text: bytes, place: Ints) -> Bools:
        """Whether this text stands at each place."""
        size = len(self._bytes) - len(text) + 1
        good = place < size
        if size > 0 and good.any():
            windows: Texts = np.ndarray((size,), f"S{len(text)}", self._bytes.data, strides=(1,))
            good[good] = windows[place[good]] == text
        return good

    def cut(self, begin: Ints, end: Ints) -> npt.NDArray[np.uint8]:
        """The bytes between these places, a row for each, filled up with NUL."""
        length = end - begin
        width = max(2, int(length.max(initial=0)))
        windows = np.lib.stride_tricks.sliding_window_view(self._bytes, width)
        kept = np.tri(width + 1, width, -1, dtype=np.uint8) * np.uint8(255)
        rows = windows[begin]
        rows &= kept[length]
        return rows

    def numbers(self, begin: Ints, end: Ints, *, whole: bool) -> Floats | None:
        """The numbers at these places, or None if one is not what JSON allows and we can keep.

        `float` reads more than JSON: leading zeros, a point without digits behind it, underscores.
        """
        if self._all_the_same(begin, end):
            one = self._distinct_numbers(begin[:1], end[:1], whole=whole)
            return None if one is None else np.repeat(one, len(begin))
        return self._distinct_numbers(begin, end, whole=whole)

    def _all_the_same(self, begin: Ints, end: Ints) -> bool:
        """Whether one text stands at all places, as of memory that does not grow."""
        first, last = (self._bytes[begin[i] : end[i]].tobytes() for i in (0, -1))
        if first != last or not np.all(end - begin == len(first)):
            return False
        return bool(self._says(first, begin).all())

    def _distinct_numbers(self, begin: Ints, end: Ints, *, whole: bool) -> Floats | None:
        rows, length = self.cut(begin, end), end - begin
        first, second, last = rows[:, 0], rows[:, 1], self._bytes[end - 1]
        starts_well = _is_digit(first) & ((first != _ZERO) | ~_is_digit(second))
        fits = (length <= _SAFE) | (second == _DOT)
        if not np.all(starts_well & _is_digit(last) & fits):
            return None
        if whole and not (np.all(_is_digit(rows) | (rows == 0)) and np.all(length <= _EXACT)):
            return None
        if _is_odd(rows.tobytes()):
            return None
        text: Texts = rows.view(f"S{rows.shape[1]}")[:, 0]
        try:
            values = text.astype(np.float64)
        except ValueError:
            return None
        return values if np.isfinite(values).all() else None


def _is_odd(raw: bytes) -> bool:
    """Whether `float` might read what JSON does not: 1_0, 1.e5. One byte is found far sooner."""
    return b"_" in raw or any(e in raw and b"." + e in raw for e in (b"e", b"E"))


def _is_digit(byte: npt.NDArray[np.uint8]) -> Bools:
    return (byte >= _ZERO) & (byte <= _NINE)
