"""Where a command's words go: whole lines in a pipe, tables and colors by rich on a terminal.

Rich is imported by what needs a layout or a color, so that the short answers stay quick.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TextIO

from runbook.errors import in_one_line, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

# An attribute of a stream that stands in the place of one that the caller had closed.
CLOSED = "closed_by_the_caller"
_STYLE_OF = {
    **dict.fromkeys(("GO", "PASS", "WINNER", "TIE", "KEEP"), "green"),
    **dict.fromkeys(("NO-GO", "FAIL", "DROP"), "red"),
    "SKIPPED": "dim",
}
# Columns of what nobody looks at: a pipe and a file have whole lines.
_ENDLESS = 1 << 20


def style_of(word: str) -> str:
    """The style of an outcome, a verdict or a decision, the same wherever it is printed."""
    return _STYLE_OF.get(word, "yellow")


class Painted(str):
    """Lines that `rendered` made: all their escape codes are colors of ours."""

    __slots__ = ()


class _Line(NamedTuple):
    """A line with its colors, and the columns that it takes on a terminal."""

    text: str
    columns: int


def rendered(
    *parts: RenderableType,
    width: int | None = None,
    color: bool = False,
    stream: TextIO | None = None,
    fold: bool = False,
    end: str = "",
) -> Painted:
    """The parts, a text or what rich lays out, as lines: wrapped between words to `width` columns,
    without one never.

    A part with a longer word is left whole, for the terminal to wrap, so that a path or a command
    can be copied; with `fold` the word is broken. Whatever a part holds, its control characters
    are spelled out. `stream` tells by its encoding which characters a bar may have.
    """
    lines = _laid_out(parts, width=width, color=color, stream=stream, fold=fold)
    return Painted("\n".join(line.text for line in lines) + end)


def _laid_out(
    parts: Iterable[RenderableType],
    *,
    width: int | None,
    color: bool,
    stream: TextIO | None,
    fold: bool,
) -> list[_Line]:
    from rich.color import ColorSystem
    from rich.console import Console as Rich
    from rich.measure import Measurement
    from rich.segment import Segment
    from rich.style import Style
    from rich.text import Text

    rich = Rich(
        file=stream, width=width or _ENDLESS, height=1, force_terminal=False, markup=False,
        emoji=False, highlight=False, color_system="standard" if color else None,
    )  # fmt: skip
    system, found = ColorSystem.STANDARD if color else None, []
    for part in (Text(_cell(one)) if isinstance(one, str) else one for one in parts):
        options, endless = rich.options, rich.options.update(width=_ENDLESS)
        if not fold and Measurement.get(rich, endless, part).minimum > options.max_width:
            options = endless
        for line in Segment.split_lines(rich.render(part, options)):
            spans = [(printable(one.text), one.style or Style.null()) for one in line]
            while spans and not spans[-1][0].strip():
                spans.pop()
            if spans:
                spans[-1] = (spans[-1][0].rstrip(), spans[-1][1])
            text = "".join(style.render(text, color_system=system) for text, style in spans)
            columns = Segment.get_line_length([Segment(text) for text, _ in spans])
            found.append(_Line(text, columns))
    return found


def marked(before: str, outcome: str, after: str, *, color: bool, width: int | None = None) -> str:
    """A line with an outcome in its color; in `width` columns, if they are given, it is wrapped."""
    line = f"{before}{outcome}{after}"
    if not color and (width is None or len(line) < width):
        return line
    from rich.text import Text

    text = Text.assemble(_cell(before), (_cell(outcome), style_of(outcome)), _cell(after))
    return rendered(text, color=color, width=width)


def _cell(text: str) -> str:
    """The text in one line, whose width does not depend on where it begins."""
    return in_one_line(text).replace("\t", " ")


def table_of(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, styled: int | None = None
) -> RenderableType:
    """Rows two spaces apart, under a header if there is one; the column `styled` has outcomes."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=bool(header),
        header_style="none",
    )  # fmt: skip
    told = [tuple(row) for row in rows]
    for name in header or ("",) * max(map(len, told), default=0):
        table.add_column(Text(name), overflow="fold")
    for row in told:
        cells = [Text(_cell(cell)) for cell in row]
        if styled is not None and (word := row[styled].strip(" -")):
            cells[styled].highlight_words([word], style_of(word))
        table.add_row(*cells)
    return table


def whole(line: str) -> RenderableType:
    """A line that is never wrapped: a command, to be copied."""
    from rich.text import Text

    return Text(_cell(line), no_wrap=True, overflow="ignore")


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


def _columns(stream: TextIO) -> int:
    """The width of the terminal now; 80 or $COLUMNS where it does not tell."""
    try:
        told = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        told = 0
    return told or shutil.get_terminal_size().columns


class OutputFormat(StrEnum):
    """For whom a run is told: people, a program, or GitHub Actions."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


class Console:
    """Where a command's words go: a line stays one line and drives no terminal, whatever it holds.

    `quiet` drops progress, never results or errors; without `live` nothing is ever redrawn. With
    `as_json` an answer is its document.
    """

    def __init__(
        self,
        *,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        color: bool = True,
        quiet: bool = False,
        live: bool = True,
        as_json: bool = False,
    ) -> None:
        self.stdout = sys.stdout if stdout is None else stdout
        self._stderr = sys.stderr if stderr is None else stderr
        self.quiet, self._live, self.as_json = quiet, live, as_json
        self.color_out = _wants_color(self.stdout, color)
        self.color_err = _wants_color(self._stderr, color)
        # Drawn and written by two threads: whoever shows a run redraws while it works.
        self._lock = threading.RLock()
        self._drawn: list[_Line] = []
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
    def is_live(self) -> bool:
        """True if progress may be drawn and redrawn: a terminal that somebody watches."""
        return self._live and _is_terminal(self._stderr) and not (self.quiet or in_ci())

    @property
    def width_out(self) -> int | None:
        """The columns of the terminal that stdout is; None for a pipe and a file."""
        return _columns(self.stdout) if _is_terminal(self.stdout) else None

    @property
    def columns(self) -> int | None:
        """The columns in which progress is told; None where no terminal wraps it."""
        return _columns(self._stderr) if _is_terminal(self._stderr) else None

    def result(self, *lines: str) -> None:
        """Lines of the command's answer, on stdout."""
        self._write(self.stdout, self._lines(lines))

    def page(self, text: str) -> None:
        """An answer that was put together elsewhere, line by line, on stdout."""
        self._write(self.stdout, self._page(text))

    def tell(self, document: object, parts: Iterable[RenderableType]) -> None:
        """An answer on stdout: its document where a program asks, else its lines and tables."""
        if self.as_json:
            self.json_document(document)
            return
        for part in parts:
            self.result(part if isinstance(part, str) else self._rendered(part))

    def _rendered(self, part: RenderableType) -> Painted:
        return rendered(part, width=self.width_out, color=self.color_out, stream=self.stdout)

    def _lines(self, lines: Sequence[str]) -> str:
        texts = (one if isinstance(one, Painted) else in_one_line(one) for one in lines)
        return "".join(map(self._page, texts))

    def _page(self, text: str) -> str:
        text = text if isinstance(text, Painted) else printable(text)
        return f"{text.removesuffix(chr(10))}\n"

    def json_line(self, document: object) -> None:
        """One compact JSON document on a line of stdout."""
        self.result(json.dumps(document, separators=(",", ":")))

    def json_document(self, document: object) -> None:
        """One indented JSON document on stdout."""
        self.page(json.dumps(document, indent=2))

    def progress(self, *lines: str) -> None:
        """Lines about what is going on, on stderr; nothing if quiet."""
        if not self.quiet:
            self.error(*lines)

    def error(self, *lines: str) -> None:
        """Lines about what went wrong, on stderr, quiet or not."""
        with self._lock:
            text = self._lines(lines)
            self._write(self._stderr, f"{self._erasure()}{text}{self._drawing()}")

    def draw(self, *parts: RenderableType) -> None:
        """Show the parts below all that was written, in the place of those drawn before.

        Only where the console `is_live`.
        """
        width = max(1, _columns(self._stderr) - 1)  # some terminals wrap as a line fills them
        lines = _laid_out(parts, width=width, color=self.color_err, stream=self._stderr, fold=True)
        with self._lock:
            if lines == self._drawn:
                return
            erasure, self._drawn = self._erasure(), list(lines)
            self._write(self._stderr, erasure + self._drawing())

    def _drawing(self) -> str:
        return "\n".join(line.text for line in self._drawn)

    def _erasure(self) -> str:
        """What takes the drawn lines away; a terminal that was made narrower has wrapped them.

        Rich's own `Live` counts the lines as it wrote them, and leaves the others there.
        """
        if not self._drawn:
            return ""
        columns = max(1, _columns(self._stderr))
        rows = sum(max(1, -(-line.columns // columns)) for line in self._drawn)
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
                with suppress(OSError):  # stderr may lie on the same disk: nobody is to be told
                    self.error(f"{why}: this goes on, and writes its files")


def drop(stream: TextIO) -> None:
    """Send what is still written to a stream nowhere, also what Python flushes at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
