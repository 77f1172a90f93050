"""The same within rounding: how far a result is from what is right, and how far it may be.

One measure for whatever is computed twice: attention and its equations, other kernels and our own,
a replay and the host, a layer and the oracle, a gradient and a second one. Errors are root mean
squares, as shares of what is right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Sums of float32 in another order are as far apart, whatever else is compared.
FLOAT32_SUMS = 1e-5
# Two roundings of the same sums may be as far apart as each is from the sums.
TIMES_OURS = 2.0


def rms(x: Tensor) -> Tensor:
    """Root mean square of each row of x, in float64."""
    return x.double().square().mean(-1).sqrt()


@dataclass(frozen=True, kw_only=True)
class Error:
    """Shares of what is right; absolute where that is 0.

    whole: over the whole tensor. row: of its worst row, over that row's size or the tensor's,
    whichever is larger. place: of its worst row, over the tensor's size.
    """

    whole: float
    row: float
    place: float


def error_of(got: Tensor, right: Tensor) -> Error:
    """The error of a result [..., D], whose rows are the last axis."""
    if not right.numel():
        return Error(whole=0.0, row=0.0, place=0.0)
    right = right.double()
    off, sizes = rms(got.double() - right), rms(right)
    scale = float(sizes.square().mean().sqrt())
    whole, worst = float(off.square().mean().sqrt()), float(off.max())
    if scale == 0:
        return Error(whole=whole, row=worst, place=worst)
    row = float((off / sizes.clamp_min(scale)).max())
    return Error(whole=whole / scale, row=row, place=worst / scale)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """An error of a tensor, and what rounding explains of it."""

    what: str
    error: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.what}: off by {self.error:.3g}, allowed {self.allowed:.3g}"

    @property
    def too_wide(self) -> bool:
        """Is it beyond the bound? A number that is not finite is."""
        return not self.error <= self.allowed

    @property
    def beyond(self) -> float:
        """The error in units of the bound; one that is no number is beyond all others."""
        return math.inf if math.isnan(self.error) else self.error / self.allowed


def errors_of(got: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    """The errors of results by name, each over its whole tensor."""
    return {name: error_of(got[name], value).whole for name, value in right.items()}


def widest(errors: Mapping[str, float], ours: Mapping[str, float], *, of: str = "") -> Gap:
    """The widest gap of results by name, `of` something.

    Twice as far off as our own result of that name is allowed, and what sums of float32 are.
    """
    gaps = [
        Gap(what=of + name, error=error, allowed=max(TIMES_OURS * ours[name], FLOAT32_SUMS))
        for name, error in errors.items()
    ]
    return max(gaps, key=lambda gap: gap.beyond)


def or_null(number: float, digits: int = 17) -> float | None:
    """The number to so many digits, for a line that has no NaN: None where it is not finite."""
    return float(f"{number:.{digits}g}") if math.isfinite(number) else None


def plain_floats(values: dict[str, float]) -> dict[str, Any]:
    """Rounded to six digits, for a line that people may read."""
    return {name: float(f"{value:.6g}") for name, value in values.items()}
