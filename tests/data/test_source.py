"""Reading ahead: same batches in the same order, stalls named, errors handed over."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from nsa.data.source import DEPTH, Batch, DataError, DataStallError, GeneratedSource, PrefetchSource
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


def wrap(source: Any, *, timeout_s: float = 5) -> PrefetchSource:
    return PrefetchSource(source, timeout_s=timeout_s)


def test_batches_and_positions_come_through_unchanged() -> None:
    ahead, straight = wrap(inner()), inner()
    for _ in range(2 * DEPTH):
        one, other = ahead.fetch(), straight.fetch()
        assert torch.equal(one.tokens, other.tokens)
        # The position is that of the batch, not of how far the thread has read.
        assert one.position == other.position
    ahead.close()


@pytest.mark.parametrize(("good", "words"), [(0, "the first batch"), (2, "batch 3")])
def test_stalls_are_named_with_their_budget(good: int, words: str) -> None:
    source = Stalling(good)
    ahead = wrap(source, timeout_s=60)
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


def test_errors_of_the_reader_are_raised_by_fetch() -> None:
    class Broken(GeneratedSource):
        def fetch(self) -> Batch:
            raise DataError("planted")

    with pytest.raises(DataError, match="planted"):
        wrap(Broken(*GIVEN)).fetch()


def test_a_closed_source_leaves_no_thread_behind() -> None:
    """One that lives when Python ends may abort the process, whatever the program did."""
    before, ahead = set(threading.enumerate()), wrap(inner())
    ahead.fetch()
    assert set(threading.enumerate()) - before
    ahead.close()
    assert not set(threading.enumerate()) - before
