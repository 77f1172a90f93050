"""Comma-separated rows from a file that may be torn, damaged or still growing.

A row counts only if it ends in a newline and has exactly the header's number of fields, all of
them readable. pandas alone would take a torn `60,...,1` for one token per second.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runbook.folder.launch import WholeLines
from runbook.records.evidence import Frame, RowFile

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


_NEWLINE, _COMMA = 10, 44
_NOT_A_NUMBER = ("", "nan", "NaN", "-nan", "-NaN", "NAN")
_LARGEST_EXACT = float(2**53)


@dataclass(frozen=True, kw_only=True)
class RowSpec:
    """What the columns of a file are: `text` columns are strings, all others are numbers.

    The header must begin with the first one, the `key`. `filled` columns may not be empty.
    `headerless` names the columns of the older form of the file, which has no header. Of a file
    that is `complete` no column may lack: whoever asks for its numbers needs all of them.
    """

    columns: tuple[str, ...]
    text: frozenset[str] = frozenset()
    filled: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    headerless: tuple[str, ...] = ()
    complete: bool = False

    @property
    def key(self) -> str:
        """The first column."""
        return self.columns[0]

    @classmethod
    def of(cls, columns: str, *, complete: bool = False, **kinds: str) -> RowSpec:
        """The columns as words, and those of each kind (`text`, `filled`, `whole`)."""
        named: dict[str, Any] = {kind: frozenset(kinds[kind].split()) for kind in kinds}
        return cls(columns=tuple(columns.split()), complete=complete, **named)


class _Reader:
    """State of one pass over a file."""

    def __init__(self, spec: RowSpec) -> None:
        self.spec = spec
        self.columns: tuple[str, ...] = ()
        self.legacy = False
        self.frames: list[Frame] = []
        self.bad_rows = 0
        self.headers_again = 0
        self.nul_rows = 0
        self.unreadable = ""

    def feed(self, block: bytes) -> None:
        """Take whole lines."""
        if not self.columns and not self.unreadable:
            block = self._take_header(block)
        if self.unreadable or not block:
            return
        frame = self._fast(block)
        self.frames.append(self._by_line(block) if frame is None else frame)

    def _by_line(self, block: bytes) -> Frame:
        """A row that cannot be read is counted and dropped."""
        import pandas as pd

        wanted, header = self._wanted(), ",".join(self.columns)
        places = [(self.columns.index(name), name) for name in wanted]
        rows: list[list[float | str]] = []
        for line in block.decode("utf-8", "replace").split("\n")[:-1]:
            text = line.rstrip("\r")
            fields = text.split(",")
            if "\0" in text:
                self.nul_rows += 1
            elif text == header:
                self.headers_again += 1
            elif len(fields) != len(self.columns):
                self.bad_rows += 1
            else:
                try:
                    rows.append([self._value(name, fields[place]) for place, name in places])
                except ValueError:
                    self.bad_rows += 1
        return pd.DataFrame(dict(zip(wanted, zip(*rows, strict=True), strict=False)))

    def _take_header(self, block: bytes) -> bytes:
        line, _, rest = block.partition(b"\n")
        words = line.decode("utf-8", "replace").strip("\r\ufeff ").split(",")
        names = tuple(word.strip() for word in words)
        if names[0] == self.spec.key:
            self.columns = names
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                self.unreadable = f"the header names columns twice: {', '.join(repeated)}"
            elif self.spec.complete and (lacking := set(self.spec.columns) - set(names)):
                self.unreadable = f"the header lacks: {', '.join(sorted(lacking))}"
            return rest
        if len(names) == len(self.spec.headerless) and names[0].isdecimal():
            self.columns, self.legacy = self.spec.headerless, True
            return block
        self.unreadable = (
            f"the first line is not a header that begins with {self.spec.key!r}: {line[:60]!r}"
        )
        return b""

    def _wanted(self) -> list[str]:
        return [name for name in self.spec.columns if name in self.columns]

    def _fast(self, block: bytes) -> Frame | None:
        """The whole block through the C parser, or None if any row of it needs a closer look."""
        import numpy as np
        import pandas as pd

        if b"\0" in block or not _all_plain(block, len(self.columns)):
            return None
        wanted = self._wanted()
        numbers = [name for name in wanted if name not in self.spec.text]
        options: dict[str, Any] = {
            "header": None,
            "names": list(self.columns),
            "usecols": wanted,
            "dtype": {name: np.float64 if name in numbers else str for name in wanted},
            "keep_default_na": False,
            "quoting": csv.QUOTE_NONE,
            "skip_blank_lines": False,
            "low_memory": False,
        }
        words = dict.fromkeys(numbers, _NOT_A_NUMBER)
        try:
            frame: Frame = pd.read_csv(io.BytesIO(block), na_values=words, **options)
        except ValueError:
            return None
        for name in wanted:
            if name in self.spec.filled and bool(frame[name].isna().any()):
                return None
            if name in self.spec.whole and not _all_whole(frame[name].to_numpy()):
                return None
        return frame

    def _value(self, name: str, cell: str) -> float | str:
        """What a cell of this column holds, NaN and infinities included. Raises ValueError."""
        if name in self.spec.text:
            return cell
        whole = name in self.spec.whole
        if not (whole or name in self.spec.filled or cell.strip()):
            return math.nan
        if "_" in cell:  # Python reads 1_000 as a number; no trainer writes that
            raise ValueError(cell)
        number = float(cell)
        if whole and not (abs(number) <= _LARGEST_EXACT and number.is_integer()):
            raise ValueError(cell)
        return number

    def damage(self) -> list[str]:
        """What is wrong with the rows that were taken."""
        counts = {
            "the header occurs {} more times": self.headers_again,
            "{} rows hold NUL bytes and were dropped": self.nul_rows,
            "{} unreadable rows were dropped": self.bad_rows,
        }
        found = [text.format(count) for text, count in counts.items() if count]
        return [self.unreadable, *found] if self.unreadable else found

    def frame(self) -> Frame:
        """All rows so far, whole-number columns as int64."""
        import pandas as pd

        spec = self.spec
        wanted = self._wanted() if self.columns and not self.unreadable else list(spec.columns)
        found = [frame for frame in self.frames if len(frame)] or [pd.DataFrame(columns=wanted)]
        kinds = {name: "str" if name in spec.text else "float64" for name in wanted}
        kinds |= dict.fromkeys(spec.whole & kinds.keys(), "int64")
        return pd.concat(found, ignore_index=True).astype(kinds)


def read_rows(path: Path, spec: RowSpec) -> RowFile:
    """Read the complete rows of `path` in one pass; never raises for what the file holds.

    Raises `OSError` if the file cannot be read at all.
    """
    reader, lines = _Reader(spec), WholeLines(path)
    for block in lines:
        reader.feed(block)
    damage = [*lines.problems, *reader.damage()]
    nul = " that ends in NUL bytes" if lines.torn.endswith(b"\0") else ""
    torn = f"a torn last line{nul} was dropped ({lines.torn_bytes} bytes)"
    return RowFile(
        frame=reader.frame(),
        sha256=lines.sha256,
        legacy=reader.legacy,
        dropped_rows=reader.bad_rows + reader.nul_rows + lines.endless + bool(lines.torn_bytes),
        damaged=bool(damage),
        problems=(*([torn] if lines.torn_bytes else []), *damage),
    )


def _all_plain(block: bytes, columns: int) -> bool:
    """Whether every line has so many fields. A repeated header has: pandas refuses its words."""
    import numpy as np

    data = np.frombuffer(block, dtype=np.uint8)
    marks = np.flatnonzero((data == _COMMA) | (data == _NEWLINE))
    if len(marks) % columns:
        return False
    said = data[marks].reshape(-1, columns) == _NEWLINE
    return bool(said[:, -1].all()) and not said[:, :-1].any()


def _all_whole(values: npt.NDArray[np.float64]) -> bool:
    """Finite, without a fraction, and small enough to be exact in a float64."""
    import numpy as np

    return bool(((np.abs(values) <= _LARGEST_EXACT) & (values == np.floor(values))).all())
