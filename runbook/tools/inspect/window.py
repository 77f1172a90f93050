"""The runbook's last-50 statistic of a file as it is, and what an honest one can use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

from runbook.records.evidence import TrainingLog
from runbook.records.measurement import TOKENS_PER_SECOND, Measurement
from runbook.stats.throughput import (
    StatisticsError,
    WindowTooShort,
    cadence,
    effective,
    last_window,
    measured_rows,
    typical,
    warmup_cut,
)
from runbook.tools.inspect.types import Found, RemarkCode, Segment, Statistic


def parts_of(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The stretches of rows in which the step increases."""
    if not len(frame):
        return
    cuts = np.flatnonzero(np.diff(frame["step"].to_numpy()) <= 0) + 1
    edges = [0, *cuts.tolist(), len(frame)]
    for start, stop in pairwise(edges):
        yield frame.iloc[start:stop]


def segment_of(index: int, part: pd.DataFrame) -> Segment:
    steps = part["step"].to_numpy()
    arms = tuple(sorted(set(part["arm"]) - {""})) if "arm" in part else ()
    return Segment(
        index=index,
        rows=len(part),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        every=cadence(part),
        warmup_rows=warmup_rows(part),
        arms=arms,
    )


def warmup_rows(part: pd.DataFrame) -> int:
    """Leading rows that are slower than the rest, or those that the trainer marked itself."""
    if "warmup" in part and bool(part["warmup"].any()):
        return int(part["warmup"].sum())
    if "dt_s" not in part and "toks_per_s" not in part:
        return 0
    if "dt_s" in part:
        times = part["dt_s"].to_numpy(dtype=np.float64)
    else:
        rates = part["toks_per_s"].to_numpy(dtype=np.float64)
        times = 1.0 / np.where(rates > 0, rates, np.nan)
    return warmup_cut(times) if bool(np.isfinite(times).all()) else 0


WINDOW = 50
_MEAN_SLACK = 0.05
_SLOW = 0.95


def window_of(
    log: TrainingLog, parts: list[pd.DataFrame]
) -> tuple[list[Statistic], int, list[Found]]:
    """The runbook's last-50 statistic as its snippet gives it, and what an honest one can use.

    What is not finite is no number that anybody could quote; another remark names such rows.
    """
    with np.errstate(all="ignore"):
        statistics, available, remarks = _window_of(log, parts)
    finite = [one for one in statistics if math.isfinite(one.value)]
    return finite, available, remarks


def _window_of(
    log: TrainingLog, parts: list[pd.DataFrame]
) -> tuple[list[Statistic], int, list[Found]]:
    if not parts or "toks_per_s" not in log.frame:
        return [], 0, [_too_short(0, 1)]
    arms = sorted(set(parts[-1]["arm"]) - {""}) if "arm" in parts[-1] else []
    if arms and len(parts) == 1:
        return _window_of_arms(log, arms)
    last = replace(log, frame=parts[-1])
    every = cadence(parts[-1])
    naive, remarks = _naive(log, parts)
    statistics = []
    steps = parts[-1]["step"].to_numpy()
    available = int(np.count_nonzero(steps > steps[-1] - WINDOW))
    try:
        honest = _measured("last_50_steps", last_window(last, n=WINDOW))
        statistics.append(honest)
        if honest.value != naive.value or naive.runs > 1:
            statistics.insert(0, naive)
    except WindowTooShort as error:
        statistics.append(naive)
        if len(parts) == 1 and not log.legacy:
            remarks = []  # nobody quotes that window: our own statistic refuses it
        available = min(available, error.available)
        remarks.append(_too_short(available, every))
    statistics += _rates_over_time(last)
    return statistics, available, remarks


def _window_of_arms(log: TrainingLog, arms: list[str]) -> tuple[list[Statistic], int, list[Found]]:
    statistics: list[Statistic] = []
    available = []
    for arm in arms:
        rows = measured_rows(log, arm=arm)
        available.append(min(WINDOW, len(rows)))
        if len(rows) >= WINDOW:
            found = last_window(log, n=WINDOW, arm=arm)
            statistics.append(_measured(f"last_50_steps[{arm}]", found))
        if len(rows):
            statistics.append(_measured(f"effective[{arm}]", effective(log, arm=arm)))
    least = min(available)
    remarks = [] if least >= WINDOW else [_too_short(least, 1, " of its poorest arm")]
    return statistics, least, remarks


def _measured(name: str, found: Measurement) -> Statistic:
    if found.window is None:
        raise ValueError(f"{found.name} has no window")
    return Statistic(
        name=name,
        value=float(found.value),
        stdev=found.stdev,
        unit=found.unit,
        n=found.n,
        **found.window.model_dump(),
    )


def _statistic(
    name: str,
    value: float,
    stdev: float | None,
    rows: pd.DataFrame,
    *,
    runs: int = 1,
    note: str = "",
) -> Statistic:
    return Statistic(
        name=name,
        value=value,
        stdev=stdev,
        unit=TOKENS_PER_SECOND,
        n=len(rows),
        first_step=int(rows["step"].min()),
        last_step=int(rows["step"].max()),
        runs=runs,
        note=note,
    )


def _naive(log: TrainingLog, parts: list[pd.DataFrame]) -> tuple[Statistic, list[Found]]:
    """What `rows[-50:]` of the runbook's snippet takes, however many runs and steps that is."""
    rows = log.frame.iloc[-WINDOW:]
    rates = rows["toks_per_s"].to_numpy(dtype=np.float64)
    touched, warm, left = 0, 0, len(rows)
    for part in reversed(parts):
        taken = min(left, len(part))
        if not taken:
            break
        touched += 1
        left -= taken
        warm += _slow_starters(part, taken)
    statistic = _statistic(
        "last_50_rows",
        float(np.mean(rates)),
        float(np.std(rates)),
        rows,
        runs=touched,
        note=f"as the runbook's snippet computes it: rows, not steps{_flattery(rates)}",
    )
    found: list[Found] = []
    if warm:
        text = f"the last {len(rows)} rows hold {warm} warm-up row{'s' if warm > 1 else ''}"
        text += f" (window: steps {statistic.first_step}-{statistic.last_step}"
        text += f" of {touched} runs)" if touched > 1 else ")"
        found.append((RemarkCode.WARMUP_IN_WINDOW, text))
    return statistic, found


def _slow_starters(part: pd.DataFrame, taken: int) -> int:
    """How many of the last `taken` rows are warm-up: marked so, or slow rows of the beginning."""
    outside = len(part) - taken
    if "warmup" in part and bool(part["warmup"].any()):
        return int(part["warmup"].iloc[outside:].sum())
    rates = part["toks_per_s"].to_numpy(dtype=np.float64)
    cut = warmup_rows(part)
    if cut <= outside:
        return 0
    return int(np.count_nonzero(rates[outside:cut] < _SLOW * np.median(rates[cut:])))


def _flattery(rates: npt.NDArray[np.float64]) -> str:
    """How far the mean of the rates flatters: whoever wrote the log has not computed it."""
    if not len(rates) or not bool((rates > 0).all()):
        return ""
    mean, harmonic = float(np.mean(rates)), float(len(rates) / np.sum(1.0 / rates))
    if mean <= harmonic * (1 + _MEAN_SLACK):
        return ""
    return (
        f"; the mean of {len(rates)} rates flatters: the same rows as tokens over time give "
        f"{harmonic:.4g} tok/s"
    )


def _rates_over_time(log: TrainingLog) -> list[Statistic]:
    """typical and effective throughput; without tokens and times, rows count as equal tokens."""
    if "tokens" not in log.frame or "dt_s" not in log.frame:
        return _rows_over_time(log)
    found = []
    for name, compute in (("typical", typical), ("effective", effective)):
        with suppress(StatisticsError):
            found.append(_measured(name, compute(log)))
    return found


def _rows_over_time(log: TrainingLog) -> list[Statistic]:
    rows = log.frame.iloc[warmup_rows(log.frame) :]
    rates = rows["toks_per_s"].to_numpy(dtype=np.float64)
    if not len(rates) or not bool((rates > 0).all()):
        return []
    value = float(len(rates) / np.sum(1.0 / rates))
    note = "tokens over time of the last run without its warm-up, if every row is as many tokens"
    return [_statistic("last_run", value, None, rows, note=note)]


def _too_short(available: int, every: int, of: str = "") -> Found:
    cadence = f", one row per {every} steps" if every > 1 else ""
    rows = "row" if available == 1 else "rows"
    text = f"the last {WINDOW} steps{of} are not there: {available} usable {rows}{cadence}"
    return RemarkCode.WINDOW_TOO_SHORT, text
