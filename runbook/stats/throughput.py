"""Throughput: the documented last-50 statistic, and those that a decision can rest on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from runbook.records import Measurement
from runbook.records.evidence import TrainingLog
from runbook.records.measurement import TOKENS_PER_SECOND
from runbook.stats.window import (
    StatisticsError,
    WindowTooShort,
    cadence,
    measured_rows,
    measurement,
    need,
    warmup_cut,
)


def last_window(log: TrainingLog, *, n: int = 50, arm: str | None = None) -> Measurement:
    """Mean and population standard deviation of `toks_per_s` over the last `n` steps.

    This is the documented statistic (requirement W3). The window is counted in
    steps: of a log with a row per k steps only the rows of the last `n` steps could count, which
    are fewer than `n`. Raises `WindowTooShort` then, and `MissingColumn` without the rate.
    """
    need(log, "step", "toks_per_s")
    rows = measured_rows(log, arm=arm)
    if len(rows) and cadence(log.frame) > 1:
        steps = rows["step"].to_numpy()
        rows = rows[steps > steps[-1] - n]
    if len(rows) < n:
        raise WindowTooShort(available=len(rows), wanted=n, path=log.path)
    rows = rows.iloc[-n:]
    rates = rows["toks_per_s"].to_numpy(dtype=np.float64)
    return measurement(
        log,
        rows,
        name=_named(f"toks_per_s_last{n}", arm),
        value=float(np.mean(rates)),
        stdev=float(np.std(rates)),
        unit=TOKENS_PER_SECOND,
    )


def typical(log: TrainingLog, *, arm: str | None = None) -> Measurement:
    """Mean tokens of a step over the median step time: what the run does when nothing pauses it.

    The automatic warm-up cut applies unless the log marks its warm-up rows itself.
    Raises `WindowTooShort` if no row is left, `MissingColumn` for the older form.
    """
    rows = _steady_rows(log, arm=arm)
    value = float(rows["tokens"].mean()) / float(rows["dt_s"].median())
    return measurement(
        log, rows, name=_named("toks_per_s_typical", arm), value=value, unit=TOKENS_PER_SECOND
    )


def effective(log: TrainingLog, *, arm: str | None = None, block: int | None = None) -> Measurement:
    """All tokens over all time: sum(tokens) / sum(dt), pauses included, warm-up excluded.

    Raises as `typical`.
    """
    rows = _steady_rows(log, arm=arm, block=block)
    name = _named("toks_per_s_effective", arm)
    return measurement(log, rows, name=name, value=_tokens_per_second(rows), unit=TOKENS_PER_SECOND)


def time_lost(log: TrainingLog) -> Measurement:
    """The share of time lost against the typical pace: 1 - effective / typical.

    Slow steps of any length count here; a stall (`steady.stall_share`) is a step of more than
    twice the median, counted whole. Raises as `typical`.
    """
    rows = _steady_rows(log)
    usual = typical(log).value
    value = 1.0 - _tokens_per_second(rows) / float(usual)
    return measurement(log, rows, name="time_lost", value=value, unit="")


def block_throughputs(log: TrainingLog) -> pd.DataFrame:
    """Tokens over time of each block, as `arm` (str), `block` (int), `value` (tok/s).

    A block that was cut short (fewer measured rows than the longest) is no sample and is left
    out. Raises `MissingColumn` for a log without arms.
    """
    need(log, "arm", "block", "tokens", "dt_s")
    rows = measured_rows(log)
    sums = rows.groupby(["block", "arm"], sort=True).agg(
        tokens=("tokens", "sum"), dt_s=("dt_s", "sum"), rows=("step", "size")
    )
    whole = sums[sums["rows"] == sums["rows"].max()] if len(sums) else sums
    result = whole.reset_index()
    result["value"] = result["tokens"] / result["dt_s"]
    return result[["arm", "block", "value"]]


def step_times(log: TrainingLog, *, arm: str | None = None) -> npt.NDArray[np.float64]:
    """Seconds of every measured step, warm-up rows left out (marked ones only, no cut)."""
    need(log, "dt_s")
    return measured_rows(log, arm=arm)["dt_s"].to_numpy(dtype=np.float64)


def _steady_rows(
    log: TrainingLog, *, arm: str | None = None, block: int | None = None
) -> pd.DataFrame:
    need(log, "step", "tokens", "dt_s")
    rows = measured_rows(log, arm=arm, block=block)
    marked = "warmup" in log.frame and bool(log.frame["warmup"].any())
    if not marked and len(rows):
        rows = rows.iloc[warmup_cut(rows["dt_s"].to_numpy(dtype=np.float64)) :]
    if not len(rows):
        raise WindowTooShort(available=0, wanted=1, path=log.path)
    if not bool((rows["dt_s"] > 0).all()):
        raise StatisticsError(f"{log.path} has step times that are not above zero seconds")
    return rows


def _tokens_per_second(rows: pd.DataFrame) -> float:
    return float(rows["tokens"].sum()) / float(rows["dt_s"].sum())


def _named(name: str, arm: str | None) -> str:
    return name if arm is None else f"{name}[{arm}]"
