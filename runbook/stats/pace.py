"""Did the machine keep one pace while arms took turns on it?

A neighbor that comes and goes slows whole stretches of steps of whatever arm has its turn. Then
rounds are no independent evidence, and a difference between arms may be the neighbor's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from runbook.stats.decision import Decided, Decision, FloatArray
from runbook.stats.throughput import MAD_TO_SIGMA

# A single slow step is no stretch: the pace is the median of so many steps.
STRETCH = 5
# The middle of the paces must lie within so many deviations of a step, or within the least spread.
MIDDLE = (0.1, 0.9)
DEVIATIONS = 3.8
LEAST_SPREAD = 0.05
# The noise of a step is that of quiet blocks: a neighbor also makes steps erratic.
QUIET = 0.25
# Steps follow each other's pace: their differences are smaller than independent ones would be
# (correlation 0.6, as measured on quiet machines).
CORRELATION = 0.6


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How far the paces of stretches lie apart, and how far they may; both as shares."""

    spread: float
    allowed: float

    @property
    def changed(self) -> bool:
        """The machine ran at more than one pace."""
        return self.spread > self.allowed

    def __str__(self) -> str:
        return f"paces {self.spread:.0%} apart, {self.allowed:.0%} allowed"


def pace_of(times: FloatArray) -> Pace:
    """Spread of the pace over all blocks, held against the noise of neighboring steps.

        x = log t - median over the arm - median over the position in the block
        spread = exp(q90 - q10 of the medians of 5 steps of x) - 1
        allowed = max(5 %, exp(3.8 sigma) - 1)

    Sigma comes from the differences of neighboring steps (median of a block, the quartile of the
    quietest blocks), so a level that changes between stretches is not part of it.

    Args:
        times: seconds per counted step, [rounds, arms, steps], finite and above 0.
    """
    x = np.log(times)
    x = x - np.median(x, axis=(0, 2), keepdims=True)
    x = x - np.median(x, axis=(0, 1), keepdims=True)
    width = min(STRETCH, x.shape[2])
    paces = np.median(np.lib.stride_tricks.sliding_window_view(x, width, axis=2), axis=-1)
    low, high = np.quantile(paces, MIDDLE)
    apart = np.median(np.abs(np.diff(x, axis=2)), axis=2) if width > 1 else np.zeros(1)
    sigma = MAD_TO_SIGMA * float(np.quantile(apart, QUIET)) / math.sqrt(2 * (1 - CORRELATION))
    allowed = max(LEAST_SPREAD, math.expm1(min(DEVIATIONS * sigma, 10.0)))
    return Pace(spread=float(np.expm1(high - low)), allowed=allowed)


# Answers that say that the arms differ, or how little they do.
_SAYS_SOMETHING = (Decided.WINNER, Decided.KEEP, Decided.DROP)


def unless_disturbed(decision: Decision, times: FloatArray | None) -> Decision:
    """The decision; INCONCLUSIVE where it rests on a machine that changed its pace.

    Args:
        decision: from the first `decision.n` rounds.
        times: as in `pace_of`, of these rounds or more; None where there are no steps to look at.
    """
    if times is None or decision.outcome not in _SAYS_SOMETHING:
        return decision
    pace = pace_of(times[: decision.n])
    if not pace.changed:
        return decision
    said = f"{decision.outcome.value} is not believed ({decision.reason})"
    return replace(
        decision,
        outcome=Decided.INCONCLUSIVE,
        winner=None,
        reason=f"{said}: the machine changed its pace under all arms, {pace}",
    )
