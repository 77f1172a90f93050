"""Tokens per second of processor time: what a busy machine disturbs far less than the clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from runbook.records import Measurement
from runbook.records.evidence import RankLog, TrainingLog
from runbook.records.measurement import Source
from runbook.stats.throughput import MissingColumn, StatisticsError, measurement, need, warmup_cut

if TYPE_CHECKING:
    import pandas as pd

TOKENS_PER_CPU_SECOND = "tok/CPU-s"
_COLUMN = "cpu_s"


def per_cpu_second(log: TrainingLog, ranks: Sequence[RankLog]) -> Measurement:
    """Mean tokens of a step over the median processor time that all ranks together spend on it.

    After the log's own warm-up cut; all threads of a rank count, other processes do not. Raises
    `MissingColumn` where a rank does not tell its processor time, `StatisticsError` where that
    time does not grow from step to step.
    """
    need(log, "step", "tokens", "dt_s")
    spent = [_per_step(rank) for rank in ranks]
    if not spent:
        raise StatisticsError(f"{log.path}: no rank wrote heartbeats beside it")
    together = sum(spent[1:], start=spent[0])
    cut = warmup_cut(log.frame["dt_s"].to_numpy(dtype=np.float64))
    # A step's time is known from the end of the step before.
    rows = log.frame.iloc[max(cut, 1) :]
    seconds = together.reindex(rows["step"]).to_numpy(dtype=np.float64)
    if not len(seconds) or not bool((seconds > 0).all()):
        raise StatisticsError(f"{log.path}: the ranks' processor time does not grow in each step")
    value = float(rows["tokens"].mean()) / float(np.median(seconds))
    made = measurement(
        log, rows, name="toks_per_cpu_s_typical", value=value, unit=TOKENS_PER_CPU_SECOND
    )
    window = made.window
    others = (Source(path=rank.path, sha256=rank.sha256, window=window) for rank in ranks)
    return made.model_copy(update={"others": tuple(others)})


def _per_step(rank: RankLog) -> pd.Series[float]:
    """Processor seconds of each step of a rank, by step."""
    steps = rank.steps
    if steps is None or _COLUMN not in steps or bool(steps[_COLUMN].isna().any()):
        raise MissingColumn(columns=[_COLUMN], path=rank.path)
    return steps.drop_duplicates("step").set_index("step")[_COLUMN].diff()
