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
    measurement,
    typical,
    warmup_cut,
)
from runbook.text import how_many
from runbook.tools.inspect import Found, RemarkCode, Segment


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
) -> tuple[list[Measurement], int, list[Found]]:
    """The runbook's last-50 statistic as its snippet gives it, and what an honest one can use.

    What is not finite is no number that anybody could quote; another remark names such rows.
    """
    if not parts or "toks_per_s" not in log.frame:
        return [], 0, [_too_short(0, 1)]
    if bool((log.frame["step"] < 0).any()):
        return [], 0, [(RemarkCode.UNREADABLE, "steps below zero: no window can be taken")]
    arms = sorted(set(parts[-1]["arm"]) - {""}) if "arm" in parts[-1] else []
    with np.errstate(all="ignore"):
        one_of_arms = bool(arms) and len(parts) == 1
        found = _window_of_arms(log, arms) if one_of_arms else _window_of_rows(log, parts)
    statistics, available, remarks = found
    return [one for one in statistics if math.isfinite(float(one.value))], available, remarks


def _window_of_rows(
    log: TrainingLog, parts: list[pd.DataFrame]
) -> tuple[list[Measurement], int, list[Found]]:
    last = replace(log, frame=parts[-1])
    naive, runs, warm = _naive(log, parts)
    remarks = [_warm(naive, runs, warm)] if warm else []
    steps = parts[-1]["step"].to_numpy()
    available = int(np.count_nonzero(steps > steps[-1] - WINDOW))
    try:
        honest = last_window(last, n=WINDOW)
        statistics = [honest] if honest.value == naive.value and runs == 1 else [naive, honest]
    except WindowTooShort as error:
        statistics = [naive]
        if len(parts) == 1 and not log.legacy:
            remarks = []  # nobody quotes that window: our own statistic refuses it
        available = min(available, error.available)
        remarks.append(_too_short(available, cadence(parts[-1])))
    return [*statistics, *_rates_over_time(last)], available, remarks


def _window_of_arms(
    log: TrainingLog, arms: list[str]
) -> tuple[list[Measurement], int, list[Found]]:
    statistics = []
    for arm in arms:
        for compute in (last_window, effective):
            with suppress(StatisticsError):
                statistics.append(compute(log, arm=arm))
    least = min(WINDOW, *(len(measured_rows(log, arm=arm)) for arm in arms))
    return (
        statistics,
        least,
        [] if least == WINDOW else [_too_short(least, 1, " of its poorest arm")],
    )


def _naive(log: TrainingLog, parts: list[pd.DataFrame]) -> tuple[Measurement, int, int]:
    """What `rows[-50:]` of the runbook's snippet takes: of how many runs, and how much warm-up."""
    rows = log.frame.iloc[-WINDOW:]
    rates = rows["toks_per_s"].to_numpy(dtype=np.float64)
    runs, warm, left = 0, 0, len(rows)
    for part in reversed(parts):
        taken = min(left, len(part))
        if not taken:
            break
        runs += 1
        left -= taken
        warm += _slow_starters(part, taken)
    of_runs = f" of {runs} runs" if runs > 1 else ""
    note = f"as the runbook's snippet computes it: rows{of_runs}, not steps{_flattery(rates)}"
    mean, stdev = float(np.mean(rates)), float(np.std(rates))
    return _rate(f"toks_per_s_last{WINDOW}_rows", mean, log, rows, note, stdev), runs, warm


def _rate(
    name: str,
    value: float,
    log: TrainingLog,
    rows: pd.DataFrame,
    note: str,
    stdev: float | None = None,
) -> Measurement:
    unit = TOKENS_PER_SECOND
    found = measurement(log, rows, name=name, value=value, unit=unit, stdev=stdev)
    return found.model_copy(update={"note": note})


def _warm(naive: Measurement, runs: int, warm: int) -> Found:
    of_runs = f" of {runs} runs" if runs > 1 else ""
    rows = how_many(warm, "warm-up row")
    text = f"the last {naive.n} rows hold {rows} (window: {naive.window}{of_runs})"
    return RemarkCode.WARMUP_IN_WINDOW, text


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


def _rates_over_time(log: TrainingLog) -> list[Measurement]:
    """typical and effective throughput; without tokens and times, rows count as equal tokens."""
    found = []
    if "tokens" in log.frame and "dt_s" in log.frame:
        for compute in (typical, effective):
            with suppress(StatisticsError):
                found.append(compute(log))
        return found
    rows = log.frame.iloc[warmup_rows(log.frame) :]
    rates = rows["toks_per_s"].to_numpy(dtype=np.float64)
    if not len(rates) or not bool((rates > 0).all()):
        return []
    value = float(len(rates) / np.sum(1.0 / rates))
    note = "tokens over time of the last run without its warm-up, if every row is as many tokens"
    return [_rate("toks_per_s_last_run", value, log, rows, note)]


def _too_short(available: int, every: int, of: str = "") -> Found:
    cadence = f", one row per {every} steps" if every > 1 else ""
    usable = how_many(available, "usable row")
    text = f"the last {WINDOW} steps{of} are not there: {usable}{cadence}"
    return RemarkCode.WINDOW_TOO_SHORT, text
