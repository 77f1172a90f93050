"""Rows that come one by one or as whole columns, and are a frame in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


class Table:
    """Columns by name, each of one type: int, bool and float, whose None is NaN, or text."""

    def __init__(self, types: Mapping[str, type]) -> None:
        self._types = dict(types)
        self._pieces: dict[str, list[Sequence[Any]]] = {name: [] for name in types}
        self._rows: list[tuple[Any, ...]] = []

    def __bool__(self) -> bool:
        return bool(self._rows) or any(self._pieces.values())

    def add(self, row: tuple[Any, ...]) -> None:
        """One row, in the order of the names."""
        self._rows.append(row)

    def extend(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Many rows at once."""
        self._close()
        for name, pieces in self._pieces.items():
            pieces.append(columns[name])

    def frame(self) -> pd.DataFrame:
        """All rows; the table is empty afterwards."""
        import numpy as np
        import pandas as pd

        self._close()
        columns: dict[str, Any] = {}
        for name, kind in self._types.items():
            pieces, self._pieces[name] = self._pieces[name], []
            if kind is str:
                columns[name] = [value for piece in pieces for value in piece]
            else:
                arrays: list[Any] = [np.asarray(piece, dtype=kind) for piece in pieces]
                columns[name] = np.concatenate([np.asarray([], dtype=kind), *arrays])
        return pd.DataFrame(columns, copy=False)

    def _close(self) -> None:
        rows, self._rows = self._rows, []
        for pieces, values in zip(self._pieces.values(), zip(*rows, strict=True), strict=False):
            pieces.append(values)
