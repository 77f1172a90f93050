"""Plain aligned columns, never cut: a table in a pipe is the table on a screen."""

from __future__ import annotations

from collections.abc import Sequence

from runbook.console import printable

__all__ = ["table"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under a header, two spaces apart; the last column is not padded."""
    cells = [tuple(header), *(tuple(printable(cell) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )
