"""Plain aligned columns, never cut: a table in a pipe is the table on a screen."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TextIO
from unicodedata import category, combining, east_asian_width

# The mark of this process's own escape codes; drawn anew, so that no text from outside holds it.
_INK = f"\x1b{os.urandom(8).hex()}["
_CODES = re.compile(re.escape(_INK) + "[0-9;]*m")
# A caveat that lists settings begins small: FLAKY and REPEATED name launches and phases.
_LISTING = re.compile(r"([a-z][a-z ]*) \((.*)\)", re.DOTALL)
_LISTED = 3
# An attribute of a stream that stands in the place of one that the caller had closed.
CLOSED = "closed_by_the_caller"
_STYLES = {"good": "32", "bad": "31", "unsure": "33", "bold": "1", "dim": "2"}
_STYLE_OF = {
    **dict.fromkeys(("GO", "PASS", "WINNER", "TIE", "KEEP"), "good"),
    **dict.fromkeys(("NO-GO", "FAIL", "DROP"), "bad"),
    "SKIPPED": "dim",
}


def style_of(word: str) -> str:
    """The style of an outcome, a verdict or a decision, the same wherever it is printed."""
    return _STYLE_OF.get(word, "unsure")


def verdict_text(verdict: str, caveats: Iterable[str]) -> str:
    """The verdict with what it leaves out: `GO for 1 of 61 checks, fewer steps (13 settings)`."""
    whole = " " not in verdict  # of a PARTIAL PASS the counts stand behind the word
    texts = (_clause(short_caveat(caveat), whole=whole) for caveat in caveats)
    return f"{verdict}{''.join(texts)}"


def _clause(caveat: str, *, whole: bool) -> str:
    """A caveat as it goes on behind a verdict."""
    if not caveat.startswith("for "):
        return f", {caveat}"
    return f" {caveat}" if whole else f", {caveat.removeprefix('for ')} required"


def counted(caveat: str) -> tuple[str, str] | None:
    """What a caveat says and its list, where that is too long for a headline; else None."""
    found = _LISTING.fullmatch(caveat)
    long = found is not None and found[2].count(", ") >= _LISTED
    return (found[1], found[2]) if found and long else None


def short_caveat(caveat: str) -> str:
    """The caveat as a headline has it: a long list of settings is counted."""
    long = counted(caveat)
    if long is None:
        return caveat
    what, listed = long
    return (
        f"{what} ({listed.count(', ') + 1} {'limits' if what.startswith('limits') else 'settings'})"
    )


def painted(text: str, *styles: str) -> str:
    """The text in these styles (good, bad, unsure, bold, dim), for a console to print."""
    return f"{_INK}{';'.join(_STYLES[style] for style in styles)}m{text}{_INK}0m"


def printable(text: str) -> str:
    """The text with control characters spelled out, so that a log line cannot drive a terminal.

    Newlines, tabs and every kind of blank stay; characters that are invisible or that reverse the
    reading direction do not.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line if line.isprintable() else _printable(line) for line in lines)


def _printable(line: str) -> str:
    return "".join(
        char if char.isprintable() or char == "\t" or category(char) == "Zs" else _spelled(char)
        for char in line
    )


def in_one_line(text: str) -> str:
    """The printable text, line breaks spelled out too: one would look like another row."""
    return printable(text).replace("\n", "\\n")


def page_of(lines: Iterable[str]) -> str:
    """Each of them in one line, painted as it was, for `Console.page`."""
    return "\n".join(_INK.join(map(in_one_line, line.split(_INK))) for line in lines)


def _spelled(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def cells(text: str) -> int:
    """Columns that a text takes on a terminal; escape codes of `painted` take none."""
    text = _CODES.sub("", text)
    if text.isascii():
        return len(text)
    return sum((east_asian_width(char) in "WF") + (not combining(char)) for char in text)


def in_ci() -> bool:
    """True if `CI` says that nobody watches: a service keeps what is written as a log."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def _wants_color(stream: TextIO, allowed: bool) -> bool:
    """--no-color, then NO_COLOR, then FORCE_COLOR, then what the stream is: the first decides."""
    if not allowed or os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or _is_terminal(stream)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class OutputFormat(StrEnum):
    """For whom a run is told: people, a program, or GitHub Actions."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


class Console:
    """Where a command's words go: a line stays one line and drives no terminal, whatever it holds.

    `quiet` drops progress, never results or errors; without `live` nothing is ever redrawn.
    """

    def __init__(
        self,
        *,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        color: bool = True,
        quiet: bool = False,
        live: bool = True,
    ) -> None:
        self.stdout = sys.stdout if stdout is None else stdout
        self._stderr = sys.stderr if stderr is None else stderr
        self.quiet, self._live = quiet, live
        self.color_out = _wants_color(self.stdout, color)
        self.color_err = _wants_color(self._stderr, color)
        # Drawn and written by two threads: whoever shows a run redraws while it works.
        self._lock = threading.RLock()
        self._drawn: tuple[str, ...] = ()
        self._outlives = False
        # stdout takes nothing (more), and what is written to it is lost.
        self.deaf = getattr(self.stdout, CLOSED, False)

    def outlive_readers(self) -> None:
        """From now on a reader that goes away, or a stdout that takes no more, ends nothing: what
        is written for it is dropped.

        For what goes on for hours, and keeps its results in files.
        """
        self._outlives = True

    @property
    def unicode_out(self) -> bool:
        """True if stdout takes any character."""
        return (getattr(self.stdout, "encoding", None) or "").lower().startswith("utf")

    @property
    def is_live(self) -> bool:
        """True if progress may be drawn and redrawn: a terminal that somebody watches."""
        return self._live and _is_terminal(self._stderr) and not (self.quiet or in_ci())

    @property
    def columns(self) -> int:
        """The width of the terminal now; 80 or $COLUMNS where it does not tell."""
        try:
            told = os.get_terminal_size(self._stderr.fileno()).columns
        except (OSError, ValueError):
            told = 0
        return told or shutil.get_terminal_size().columns

    def can_show(self, text: str) -> bool:
        """True if stderr's encoding has every character of the text."""
        try:
            text.encode(self._stderr.encoding or "ascii")
        except UnicodeEncodeError:
            return False
        return True

    def paint(self, text: str, style: str, *, err: bool = False) -> str:
        """The text in a style (see `painted`); as it is where there is no color."""
        return painted(text, style) if (self.color_err if err else self.color_out) else text

    def result(self, *lines: str) -> None:
        """Lines of the command's answer, on stdout."""
        self._write(self.stdout, self._lines(lines))

    def page(self, text: str) -> None:
        """An answer that was put together elsewhere, line by line, on stdout."""
        self._write(self.stdout, self._page(text))

    def _lines(self, lines: Sequence[str]) -> str:
        return self._page(page_of(lines)) if lines else ""

    def _page(self, text: str) -> str:
        return "\x1b[".join(map(printable, text.split(_INK))) + "\n"

    def json_line(self, document: object) -> None:
        """One compact JSON document on a line of stdout."""
        self.result(json.dumps(document, separators=(",", ":")))

    def json_document(self, document: object) -> None:
        """One indented JSON document on stdout."""
        self.page(json.dumps(document, indent=2))

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Rows under a header, two spaces apart; the last column is not padded."""
        cells = [tuple(header), *(tuple(in_one_line(cell) for cell in row) for row in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        for row in cells:
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.result("  ".join(padded).rstrip())

    def progress(self, *lines: str) -> None:
        """Lines about what is going on, on stderr; nothing if quiet."""
        if not self.quiet:
            self.error(*lines)

    def error(self, *lines: str) -> None:
        """Lines about what went wrong, on stderr, quiet or not."""
        with self._lock:
            text = self._lines(lines)
            self._write(self._stderr, f"{self._erasure()}{text}{self._drawing()}")

    def draw(self, lines: Sequence[str]) -> None:
        """Show lines below all that was written, in the place of those drawn before.

        None may be wider than `columns`. Only where the console `is_live`.
        """
        with self._lock:
            if tuple(lines) == self._drawn:
                return
            erasure, self._drawn = self._erasure(), tuple(lines)
            self._write(self._stderr, erasure + self._drawing())

    def _drawing(self) -> str:
        return self._lines(self._drawn).removesuffix("\n")

    def _erasure(self) -> str:
        """What takes the drawn lines away; a terminal that was made narrower has wrapped them."""
        if not self._drawn:
            return ""
        columns = max(1, self.columns)
        rows = sum(max(1, -(-cells(line) // columns)) for line in self._drawn)
        up = f"\x1b[{rows - 1}A" if rows > 1 else ""
        return f"\r{up}\x1b[J"

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            # A pipe whose reader ended, or a terminal that was closed.
            gone = error.errno in (errno.EPIPE, errno.EIO)
            if not self._outlives or not (gone or stream is self.stdout):
                raise
            drop(stream)
            if stream is not self._stderr:
                self.deaf = True
                why = "nobody reads stdout any more"
                why = why if gone else f"stdout cannot be written ({error.strerror})"
                self.error(f"{why}: this goes on, and writes its files")


def drop(stream: TextIO) -> None:
    """Send what is still written to a stream nowhere, also what Python flushes at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def console_for(args: object) -> Console:
    """The console that a command's --quiet and --no-color ask for."""
    return Console(
        color=not getattr(args, "no_color", False), quiet=bool(getattr(args, "quiet", False))
    )
