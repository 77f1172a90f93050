"""Following a file of lines that grows: complete lines only, each one once."""

from __future__ import annotations

from pathlib import Path

_BLOCK_BYTES = 1 << 20
_LONGEST_LINE = 1 << 20


class LineTail:
    """Gives the lines that were completed since the last call; memory stays flat."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._pending = b""

    def lines(self) -> list[bytes]:
        """New complete lines without their newlines; nothing while there is no file.

        A file that became shorter is another file: it is read from its beginning.
        """
        try:
            with self.path.open("rb") as stream:
                stream.seek(0, 2)
                if stream.tell() < self._offset:
                    self._offset, self._pending = 0, b""
                stream.seek(self._offset)
                data = stream.read(_BLOCK_BYTES)
        except OSError:
            return []
        self._offset += len(data)
        *whole, pending = (self._pending + data).split(b"\n")
        self._pending = pending[:_LONGEST_LINE]
        return whole


class TableTail:
    """Rows of a growing CSV file as text by column; unreadable rows are left out.

    `headerless` names the columns of the older form without a header. A reader that decides from
    these rows must be content with what it can read: damage is the judge's business.
    """

    def __init__(self, path: Path, *, headerless: tuple[str, ...] = ()) -> None:
        self._tail = LineTail(path)
        self._headerless = headerless
        self._columns: tuple[str, ...] = ()
        self.path = path

    def rows(self) -> list[dict[str, str]]:
        """New whole rows."""
        return [row for line in self._tail.lines() if (row := self._row(line)) is not None]

    def _row(self, line: bytes) -> dict[str, str] | None:
        if b"\0" in line:
            return None
        fields = tuple(line.decode("utf-8", "replace").strip("\r\ufeff").split(","))
        if fields[0] == "step":
            self._columns = fields
            return None
        if not self._columns and len(fields) == len(self._headerless):
            self._columns = self._headerless
        if len(fields) != len(self._columns):
            return None
        return dict(zip(self._columns, fields, strict=True))
