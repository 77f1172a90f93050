"""Student's t on log ratios: the machinery under all decisions between numbers."""

from __future__ import annotations

import math
from functools import lru_cache

from runbook.decide._inputs import FloatArray

__all__ = ["mean_and_error", "t_quantile", "t_upper_tail"]


@lru_cache(maxsize=4096)
def t_quantile(error: float, freedom: float) -> float:
    """The t that a Student variable of `freedom` degrees exceeds with probability `error`."""
    from scipy.special import stdtrit

    return float(-stdtrit(freedom, error))


def t_upper_tail(t: float, freedom: float) -> float:
    """Probability that a Student variable of `freedom` degrees exceeds `t`."""
    from scipy.special import stdtr

    return float(stdtr(freedom, -t))


def mean_and_error(values: FloatArray) -> tuple[float, float]:
    """Mean and its standard error (n - 1 in the variance); at least two values."""
    n = values.size
    mean = float(values.mean())
    spread = values - mean
    return mean, math.sqrt(float(spread @ spread) / (n - 1) / n)
