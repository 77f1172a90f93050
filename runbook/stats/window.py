"""Which rows of a log a statistic may use."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from runbook.records import Measurement, Window
from runbook.records.evidence import TrainingLog

# Steps whose median must be usual where warm-up ends: a single quick step ends nothing.
_RUN = 5
_FEWEST_STEPS = 4
_MAD_TO_SIGMA = 1.4826


def warmup_cut(dt_s: npt.NDArray[np.float64]) -> int:
    """How many leading steps are warm-up: at least one, at most a quarter; none of under four.

    The usual pace is the median of the second half. Warm-up ends before the first step that is
    not slower than it (by 10 %, or by three robust deviations if that is more), as is the median
    of the five steps from there on. A pause later in the run moves nothing: only the beginning is
    searched, and medians are compared.
    """
    n = len(dt_s)
    if n < _FEWEST_STEPS:
        return 0
    # Never more than a quarter: what is still slow there is the run, not its warm-up, and has to
    # stay visible in its rate and in its trend. Only slow steps are cut for the same reason: a
    # run that begins fast has slowed down. The first step always goes, it allocates and compiles.
    most = n // 4
    later = dt_s[n // 2 :]
    pace = float(np.median(later))
    sigma = _MAD_TO_SIGMA * float(np.median(np.abs(later - pace)))
    allowed = pace + max(0.10 * pace, 3.0 * sigma)
    run = min(_RUN, n - most)
    heads = np.lib.stride_tricks.sliding_window_view(dt_s[1 : most + run], run)
    usual = (heads[:, 0] <= allowed) & (np.median(heads, axis=1) <= allowed)
    found = np.flatnonzero(usual)
    return int(found[0]) + 1 if len(found) else most


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
