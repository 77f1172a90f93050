"""What every piece of the parameters is drawn like before the first step, for the harness to judge.

Numbers only: what they have to be is not known here, so that one who draws otherwise cannot agree
with himself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.contract import WEIGHT_CUTS, WEIGHT_SIGNS
from nsa.model import NSALanguageModel
from nsa.train.accounts import pieces


@torch.no_grad()
def first_weights(model: NSALanguageModel) -> dict[str, dict[str, Any]]:
    """Of each group of the parameters, one number for each layer: the `weights` of the proof.

    n: elements of a piece; mean, rms, least, most; below: how many are at most `WEIGHT_CUTS` times
    the rms; signs: those of the first `WEIGHT_SIGNS` elements as bits, in hexadecimal. Five passes
    over the parameters' memory or so, and no copy of them.
    """
    groups: dict[str, dict[str, Any]] = {}
    for piece in pieces(model):
        told = _numbers(piece.of(piece.parameter.detach()).flatten())
        group = groups.setdefault(piece.group, {name: [] for name in told})
        for name, value in told.items():
            group[name].append(value)
    return groups


def _numbers(flat: Tensor) -> dict[str, Any]:
    # Sums in float64, but no float64 copy: an embedding's would be the most that a step holds.
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
    rms = norm / flat.numel() ** 0.5
    mean = flat.sum(dtype=torch.float64) / flat.numel()
    below = torch.stack([(flat <= cut * rms).sum() for cut in WEIGHT_CUTS])
    told = torch.stack([mean, rms, flat.min(), flat.max()]).tolist()
    bits = "".join("1" if up else "0" for up in (flat[:WEIGHT_SIGNS] > 0).tolist())
    return {
        "n": flat.numel(),
        **{
            name: float(f"{value:.9g}")
            for name, value in zip(("mean", "rms", "least", "most"), told, strict=True)
        },
        "below": below.tolist(),
        "signs": f"{int(bits, 2):x}",
    }
