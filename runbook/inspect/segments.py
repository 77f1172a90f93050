"""Which runs a file holds: stretches of rows whose steps increase."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pandas as pd

from runbook.inspect.types import Segment
from runbook.stats import warmup_cut

__all__ = ["parts_of", "segment_of", "warmup_rows"]


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
        every=max(1, int(np.median(np.diff(steps)))) if len(steps) > 1 else 1,
        warmup_rows=warmup_rows(part),
        arms=arms,
    )


def warmup_rows(part: pd.DataFrame) -> int:
    """Leading rows that are slower than the rest, or those that the trainer marked itself."""
    if "warmup" in part and bool(part["warmup"].any()):
        return int(part["warmup"].sum())
    if "dt_s" in part:
        times = part["dt_s"].to_numpy(dtype=np.float64)
    else:
        rates = part["toks_per_s"].to_numpy(dtype=np.float64)
        times = 1.0 / np.where(rates > 0, rates, np.nan)
    return warmup_cut(times) if bool(np.isfinite(times).all()) else 0
