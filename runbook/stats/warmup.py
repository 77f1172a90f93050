"""Where a run has warmed up, found from the step times alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["warmup_cut"]

_RUN = 5
_SHORTEST = 4
_MAD_TO_SIGMA = 1.4826


def warmup_cut(dt_s: npt.NDArray[np.float64]) -> int:
    """How many leading steps to leave out: at least one, at most half; none of fewer than four.

    The second half of the run says what is usual (median, and median absolute deviation as a
    robust sigma). The cut is the first step that is not slow itself and whose next five steps
    have a usual median: within 10 % or three sigma, whichever is wider. A pause later in the run
    moves nothing, because only the beginning is searched and medians are compared.
    """
    n = len(dt_s)
    if n < _SHORTEST:
        return 0
    half = n // 2
    later = dt_s[half:]
    level = float(np.median(later))
    sigma = _MAD_TO_SIGMA * float(np.median(np.abs(later - level)))
    limit = max(0.10 * level, 3.0 * sigma)
    stop = max(half, 1)
    heads = np.lib.stride_tricks.sliding_window_view(dt_s, min(_RUN, n - stop))[1:stop]
    usual = np.abs(np.median(heads, axis=1) - level) <= limit
    usual &= dt_s[1 : len(heads) + 1] <= level + limit
    found = np.flatnonzero(usual)
    return int(found[0]) + 1 if len(found) else stop
