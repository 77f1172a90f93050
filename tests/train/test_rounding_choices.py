"""Roundings that choose other blocks move gradients; without them nothing moves."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from benchmarks.rounding_choices import computed, off, production, rounding_otherwise


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_what_a_share_of_roundings_moves(share: float) -> None:
    made = production(layers=1, seq_len=1280)
    tokens = torch.randint(0, 256, (1, 1281), generator=torch.Generator().manual_seed(2))
    found = []
    for how in (nullcontext(), rounding_otherwise(made, share)):
        with how:
            found.append(computed(made, tokens))
    (plain, chosen), (moved, others) = found
    largest = max(off(a.flatten(), b.flatten()) for a, b in zip(plain, moved, strict=True))
    same = all(torch.equal(a, b) for a, b in zip(chosen, others, strict=True))
    assert (largest == 0 and same) if share == 0 else (1e-3 < largest < 0.2 and not same)
