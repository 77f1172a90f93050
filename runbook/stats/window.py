"""Which rows of a log a statistic may use."""

from __future__ import annotations

import numpy as np
import pandas as pd

from runbook.evidence import TrainingLog
from runbook.records import Measurement, Window

__all__ = ["MissingColumn", "StatisticsError", "WindowTooShort", "measured_rows"]


class StatisticsError(ValueError):
    """A statistic that this log cannot give."""


class WindowTooShort(StatisticsError):
    """Fewer rows than the window needs: never silently a shorter window."""

    def __init__(self, *, available: int, wanted: int, path: str) -> None:
        self.available, self.wanted, self.path = available, wanted, path
        super().__init__(
            f"{path} has {available} measured rows in the window, {wanted} are needed; "
            "run more steps, or log every step"
        )


class MissingColumn(StatisticsError):
    """The log lacks a column, as the older form does."""

    def __init__(self, *, columns: list[str], path: str) -> None:
        self.columns, self.path = columns, path
        super().__init__(f"{path} has no column {', '.join(columns)}; only rates can be shown")


def measured_rows(
    log: TrainingLog, *, arm: str | None = None, block: int | None = None
) -> pd.DataFrame:
    """The rows that count: warm-up rows left out, one arm or block if named.

    Raises `MissingColumn` if an arm or block is asked of a log without that column.
    """
    frame = log.frame
    need(log, *(["arm"] if arm is not None else []), *(["block"] if block is not None else []))
    keep = np.ones(len(frame), dtype=bool)
    if "warmup" in frame:
        keep &= ~frame["warmup"].to_numpy(dtype=bool)
    if arm is not None:
        keep &= (frame["arm"] == arm).to_numpy(dtype=bool)
    if block is not None:
        keep &= (frame["block"] == block).to_numpy(dtype=bool)
    return frame if bool(keep.all()) else frame[keep]


def need(log: TrainingLog, *columns: str) -> None:
    """Raise `MissingColumn` unless the log has all of them."""
    missing = [name for name in columns if name not in log.frame]
    if missing:
        raise MissingColumn(columns=missing, path=log.path)


def cadence(frame: pd.DataFrame) -> int:
    """Steps between two rows: 1 for a row per step, k where every k-th step was logged."""
    if len(frame) < 2:
        return 1
    return max(1, int(np.median(np.diff(frame["step"].to_numpy()))))


def measurement(
    log: TrainingLog,
    rows: pd.DataFrame,
    *,
    name: str,
    value: float,
    unit: str,
    stdev: float | None = None,
    note: str = "",
) -> Measurement:
    """A measurement over these rows of this log."""
    return Measurement(
        name=name,
        value=value,
        unit=unit,
        n=len(rows),
        window=Window(
            # Not first and last row: in a damaged log they can be in the wrong order.
            first_step=int(rows["step"].min()),
            last_step=int(rows["step"].max()),
        ),
        path=log.path,
        sha256=log.sha256,
        stdev=stdev,
        note=note,
    )
