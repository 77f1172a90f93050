"""First weights as a healthy launch tells of them: a sample of its distribution, in the middle."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping
from typing import Any

from nsa.contract import WEIGHT_CUTS
from runbook.accounts.first_weights import groups_of

_NORMAL = statistics.NormalDist()


def first_weights(env: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a rank tells of its parameters before the first step, of env.json's config."""
    return {
        name: _told(name, group.pieces, group.size, group.deviation or 0.0, group.constant)
        for name, group in groups_of(env).items()
    }


def _told(name: str, pieces: int, size: int, std: float, middle: float) -> dict[str, Any]:
    # Of so many elements about one lies beyond on each side.
    furthest = std * _NORMAL.inv_cdf(1 - 1 / (size + 1))
    each = {
        "n": size,
        "mean": middle,
        "rms": std or middle,
        "least": middle - furthest,
        "most": middle + furthest,
        "below": [round(size * _NORMAL.cdf(cut)) for cut in WEIGHT_CUTS],
    }
    names = (f"{name} {number}" for number in range(pieces))
    return {
        **{key: [value] * pieces for key, value in each.items()},
        "signs": [hashlib.blake2b(n.encode(), digest_size=8).hexdigest() for n in names],
    }
