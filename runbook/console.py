"""Plain aligned columns, never cut: a table in a pipe is the table on a screen."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO
from unicodedata import category

if TYPE_CHECKING:
    from rich.progress import Progress


_STYLES = {"good": "32", "bad": "31", "unsure": "33", "bold": "1", "dim": "2"}
_STYLE_OF = {
    **dict.fromkeys(("GO", "PASS", "WINNER", "TIE", "KEEP"), "good"),
    **dict.fromkeys(("NO-GO", "FAIL", "DROP"), "bad"),
    "SKIPPED": "dim",
}


def style_of(word: str) -> str:
    """The style of an outcome, a verdict or a decision, the same wherever it is printed."""
    return _STYLE_OF.get(word, "unsure")


def painted(text: str, *styles: str) -> str:
    """The text in the escape codes of these styles: good, bad, unsure, bold, dim."""
    return f"\x1b[{';'.join(_STYLES[style] for style in styles)}m{text}\x1b[0m"


def printable(text: str) -> str:
    """The text with control characters spelled out, so that a log line cannot drive a terminal.

    Newlines, tabs and every kind of blank stay; characters that are invisible or that reverse the
    reading direction do not.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" or category(char) == "Zs" else _spelled(char)
        for char in text.replace("\r\n", "\n")
    )


def _in_one_line(text: str) -> str:
    """A table's cell: a line break in it would look like another row."""
    return printable(text).replace("\n", "\\n")


def _spelled(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _wants_color(stream: TextIO, allowed: bool) -> bool:
    if not allowed or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


class Console:
    """Where a command's words go. `quiet` drops progress, never results or errors."""

    def __init__(
        self,
        *,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        color: bool = True,
        quiet: bool = False,
    ) -> None:
        self._stdout = sys.stdout if stdout is None else stdout
        self._stderr = sys.stderr if stderr is None else stderr
        self.quiet = quiet
        self.color_out = _wants_color(self._stdout, color)
        self.color_err = _wants_color(self._stderr, color)
        self._live: Progress | None = None

    @property
    def unicode_out(self) -> bool:
        """True if stdout takes any character."""
        return (getattr(self._stdout, "encoding", None) or "").lower().startswith("utf")

    @property
    def is_live(self) -> bool:
        """True if progress may be drawn and redrawn: a terminal that takes escapes."""
        return self.color_err and not self.quiet

    def paint(self, text: str, style: str, *, err: bool = False) -> str:
        """The text in a style (see `painted`); as it is where there is no color."""
        return painted(text, style) if (self.color_err if err else self.color_out) else text

    def result(self, text: str) -> None:
        """One piece of the command's answer, on stdout."""
        self._stdout.write(text + "\n")
        self._stdout.flush()

    def json_line(self, document: object) -> None:
        """One compact JSON document on a line of stdout."""
        self.result(json.dumps(document, separators=(",", ":")))

    def json_document(self, document: object) -> None:
        """One indented JSON document on stdout."""
        self.result(json.dumps(document, indent=2))

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Rows under a header, two spaces apart; the last column is not padded."""
        cells = [tuple(header), *(tuple(_in_one_line(cell) for cell in row) for row in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        for row in cells:
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.result("  ".join(padded).rstrip())

    def progress(self, text: str) -> None:
        """A line about what is going on, on stderr; nothing if quiet."""
        if not self.quiet:
            self._error_line(text)

    def error(self, text: str) -> None:
        """A line about what went wrong, on stderr, quiet or not."""
        self._error_line(text)

    @contextmanager
    def live(self, progress: Progress) -> Iterator[Progress]:
        """Draw `progress` on stderr; lines written meanwhile appear above it."""
        with progress:
            self._live = progress
            try:
                yield progress
            finally:
                self._live = None

    def _error_line(self, text: str) -> None:
        if self._live is not None:
            from rich.text import Text

            # soft_wrap: the terminal wraps, rich neither cuts nor pads.
            self._live.console.print(Text.from_ansi(text), soft_wrap=True)
            return
        self._stderr.write(text + "\n")
        self._stderr.flush()


def console_for(args: object) -> Console:
    """The console that a command's --quiet and --no-color ask for."""
    return Console(
        color=not getattr(args, "no_color", False), quiet=bool(getattr(args, "quiet", False))
    )
