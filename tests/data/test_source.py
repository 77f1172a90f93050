"""Generated tokens, and reading ahead: same batches in order, stalls named, errors handed over."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

from nsa.data.source import (
    CHAIN_CHANCES,
    DEPTH,
    Batch,
    DataError,
    DataStallError,
    GeneratedSource,
    PrefetchSource,
    chain_entropy_nats,
)
from nsa.settings import Share
from tests.shared import crowded

GIVEN: Any = ("synthetic", 256, Share(seq_len=8, batch_size=2, seed=1))


def inner() -> GeneratedSource:
    return GeneratedSource(*GIVEN)


class Stalling(GeneratedSource):
    """Gives `good` batches, then none until released."""

    def __init__(self, good: int) -> None:
        super().__init__(*GIVEN)
        self.good, self.release = good, threading.Event()

    def fetch(self) -> Batch:
        if self.step >= self.good:
            self.release.wait(30)
        return super().fetch()


def test_batches_and_positions_come_through_unchanged() -> None:
    ahead, straight = PrefetchSource(inner(), timeout_s=5), inner()
    for _ in range(2 * DEPTH):
        one, other = ahead.fetch(), straight.fetch()
        assert torch.equal(one.tokens, other.tokens)
        # The position is that of the batch, not of how far the thread has read.
        assert one.position == other.position
    ahead.close()


@pytest.mark.parametrize(("good", "words"), [(0, "the first batch"), (2, "batch 3")])
def test_stalls_are_named_with_their_budget(good: int, words: str) -> None:
    source = Stalling(good)
    ahead = PrefetchSource(source, timeout_s=60)
    for _ in range(good):
        ahead.fetch()
    ahead.timeout_s = 0.2
    begin = time.monotonic()
    with pytest.raises(DataStallError, match=words) as caught:
        ahead.fetch()
    assert 0.15 < time.monotonic() - begin < crowded(2)
    assert "--dataset synthetic" in str(caught.value)
    source.release.set()
    ahead.close()


def test_a_closed_source_leaves_no_thread_behind() -> None:
    """One that lives when Python ends may abort the process, whatever the program did."""
    before, ahead = set(threading.enumerate()), PrefetchSource(inner(), timeout_s=5)
    ahead.fetch()
    assert set(threading.enumerate()) - before
    ahead.close()
    assert not set(threading.enumerate()) - before


def test_markov_entropy_is_what_the_sample_shows() -> None:
    """The entropy of a token given the one before, counted over a long sample."""
    one = GeneratedSource("markov", 256, Share(seq_len=2000, batch_size=40, seed=3))
    tokens = one.fetch().tokens
    jumps = Counter(((tokens[:, 1:] - tokens[:, :-1]) % 256).flatten().tolist())
    total = sum(jumps.values())
    observed = -sum(n / total * math.log(n / total) for n in jumps.values())
    expected = -sum(p * math.log(p) for p in CHAIN_CHANCES)
    assert chain_entropy_nats() == expected == one.floor_nats
    assert observed == pytest.approx(expected, abs=0.01)
    assert len(jumps) == len(CHAIN_CHANCES)
    assert inner().floor_nats == pytest.approx(math.log(256))
    with pytest.raises(DataError, match="vocabulary"):
        GeneratedSource("markov", 100, Share(seq_len=8, batch_size=2, seed=1))
