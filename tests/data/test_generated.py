"""Generated tokens: reproducible, shared out without overlap, with the entropy that is claimed."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from nsa.data.source import CHAIN_CHANCES, DataError, GeneratedSource, chain_entropy_nats
from nsa.settings import Share


def source(kind: str = "synthetic", vocab_size: int = 256, **change: int) -> GeneratedSource:
    how = {"seq_len": 64, "batch_size": 2, "seed": 3}
    return GeneratedSource(kind, vocab_size, Share(**{**how, **change}))


def test_origin_ranks_see_different_data() -> None:
    first, second = (source(rank=rank, world_size=2).fetch().tokens for rank in range(2))
    assert not torch.equal(first, second)


def test_validation_is_repeatable_and_apart_from_training() -> None:
    one = source()
    first = torch.stack(list(one.validation(2)))
    assert torch.equal(first, torch.stack(list(one.validation(2))))
    assert not torch.equal(first[0], one.fetch().tokens)


def test_uniform_floor_is_ln_vocab() -> None:
    one = source(batch_size=64, seq_len=999)
    assert one.floor_nats == pytest.approx(math.log(256))
    assert one.floor_nats == pytest.approx(5.545, abs=1e-3)
    counts = np.bincount(one.fetch().tokens.flatten().numpy(), minlength=256)
    # Chi-square of a uniform sample has mean 255 and deviation about 23.
    chi = float(((counts - 250) ** 2 / 250).sum())
    assert 140 < chi < 370


def test_markov_entropy_is_what_the_sample_shows() -> None:
    """The entropy of a token given the one before, counted over a long sample."""
    one = source("markov", batch_size=40, seq_len=2000)
    tokens = one.fetch().tokens
    jumps = Counter(((tokens[:, 1:] - tokens[:, :-1]) % 256).flatten().tolist())
    total = sum(jumps.values())
    observed = -sum(n / total * math.log(n / total) for n in jumps.values())
    expected = -sum(p * math.log(p) for p in CHAIN_CHANCES)
    assert chain_entropy_nats() == expected == one.floor_nats
    assert observed == pytest.approx(expected, abs=0.01)
    assert len(jumps) == len(CHAIN_CHANCES)


def test_markov_needs_a_vocabulary_that_holds_its_jumps() -> None:
    with pytest.raises(DataError, match="vocabulary"):
        source("markov", vocab_size=100)
