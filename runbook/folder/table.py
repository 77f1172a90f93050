"""Rows that come one by one or as whole columns, and are a frame in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

_ROOM = 1 << 12


class Numbers:
    """An array that grows in place, so that a column is in memory once."""

    def __init__(self, kind: type | str, room: int = 0) -> None:
        import numpy as np

        self._values: npt.NDArray[Any] = np.empty(room, dtype=kind)
        self._count = 0

    @property
    def array(self) -> npt.NDArray[Any]:
        """What was put in so far."""
        return self._values[: self._count]

    def extend(self, values: npt.NDArray[np.float64] | Sequence[Any]) -> None:
        """Append, in the array's own type."""
        import numpy as np

        end = self._count + len(values)
        if end > len(self._values):
            grown = np.empty(max(_ROOM, 2 * end), dtype=self._values.dtype)
            grown[: self._count] = self.array
            self._values = grown
        self._values[self._count : end] = values
        self._count = end


class Table:
    """Columns by name, each of one type: int, bool and float, whose None is NaN, or text."""

    def __init__(self, types: Mapping[str, type]) -> None:
        self._types = dict(types)
        self._columns: dict[str, Numbers | list[Any]] = {}
        self._rows: list[tuple[Any, ...]] = []

    def __bool__(self) -> bool:
        return bool(self._rows or self._columns)

    def add(self, row: tuple[Any, ...]) -> None:
        """One row, in the order of the names."""
        self._rows.append(row)

    def extend(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Many rows at once."""
        self._close()
        self._append(columns)

    def frame(self) -> pd.DataFrame:
        """All rows; the table is empty afterwards."""
        import pandas as pd

        self._close()
        columns, self._columns = self._columns, {}
        found = {
            name: column.array if isinstance(column, Numbers) else column
            for name, kind in self._types.items()
            for column in [columns.get(name, _column(kind))]
        }
        return pd.DataFrame(found, copy=False)

    def _close(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, []
            self._append(dict(zip(self._types, zip(*rows, strict=True), strict=True)))

    def _append(self, columns: Mapping[str, Sequence[Any]]) -> None:
        for name, kind in self._types.items():
            self._columns.setdefault(name, _column(kind)).extend(columns[name])


def _column(kind: type) -> Numbers | list[Any]:
    return [] if kind is str else Numbers(kind)
