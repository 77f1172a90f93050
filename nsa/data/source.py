"""What every source gives: batches, and the position from which it can go on.

Two are here: one that generates tokens, and one that reads another ahead.
Generated tokens are uniform noise, or a Markov chain whose entropy rate is known. Samples are
numbered over the whole run. Sample i depends on the seed and i alone, so N ranks together see
exactly the batch that one rank alone would see.
"""

from __future__ import annotations

import math
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa.contract import NSAError
from nsa.settings import Share

# Batches read ahead of the training loop.
DEPTH = 4
# Reading stops at once unless a disk or a network is stuck.
_LEAVE_S = 1.0
# Chance of each successor, the same for every state, so the entropy rate is that of this list.
CHAIN_CHANCES = (0.55, 0.25, 0.15, 0.05)
_CHAIN_JUMPS = (7, 60, 101, 173)
_TRAINING, _VALIDATION = 0, 1


class DataError(NSAError):
    """The data cannot be read as asked; the message says what to do."""


class DataStallError(RuntimeError):
    """No batch arrived in time."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of one rank.

    tokens [B, S+1] int64: inputs are [:, :-1], targets [:, 1:]. position: the state of the source
    right after this batch, small and free of tensors. texts: the documents that the first batch
    of a launch begins, as they were before the tokenizer; no other batch has them.
    """

    tokens: Tensor
    position: dict[str, Any] = field(default_factory=dict)
    texts: tuple[str, ...] = ()

    def on(self, device: torch.device) -> Tensor:
        """The tokens on a device; a copy from memory that is not pinned waits for its queue."""
        pinned = self.tokens.pin_memory() if device.type == "cuda" else self.tokens
        return pinned.to(device, non_blocking=True)


class Source(ABC):
    """A rank's endless supply of batches."""

    # The lowest loss that any causal model can reach, where that is known.
    floor_nats: float | None = None
    floor_source: str = "unknown: real text"

    @abstractmethod
    def fetch(self) -> Batch:
        """The next batch. Raises DataStallError when it does not come in time."""

    @abstractmethod
    def validation(self, count: int) -> Iterator[Tensor]:
        """The same `count` batches [B, S+1] every time, from documents never trained on."""

    @abstractmethod
    def seek(self, position: dict[str, Any]) -> None:
        """Go on right after the batch that carried `position`; only before the first fetch."""

    @abstractmethod
    def where(self) -> str:
        """How far reading has come, for a message."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Stop threads and close files."""

    def statistics(self) -> dict[str, float] | None:
        """How reading ahead kept up; None for a source that does not read ahead."""
        return None


def chain_entropy_nats() -> float:
    """Entropy rate of the Markov source, in nats per token."""
    return -sum(p * math.log(p) for p in CHAIN_CHANCES)


class GeneratedSource(Source):
    """Uniform ("synthetic") or Markov ("markov") sequences of one rank.

    The chain is x[t+1] = x[t] + jump modulo the vocabulary with independent jumps: order one,
    stationary and uniform. Its conditional entropy is the lowest loss that any causal model can
    reach; for uniform noise that is ln(vocab).
    """

    def __init__(self, kind: str, vocab_size: int, share: Share) -> None:
        if kind == "markov" and vocab_size <= max(_CHAIN_JUMPS):
            raise DataError(f"markov needs a vocabulary above {max(_CHAIN_JUMPS)}")
        self.kind = kind
        self.vocab_size, self.width = vocab_size, share.seq_len + 1
        self.batch_size, self.seed = share.batch_size, share.seed
        self.rank, self.world_size = share.rank, share.world_size
        self.step = 0
        self.floor_nats = math.log(vocab_size)
        self.floor_source = f"uniform tokens: ln({vocab_size})"
        if kind == "markov":
            self.floor_nats = chain_entropy_nats()
            self.floor_source = "entropy rate of the Markov source"

    def fetch(self) -> Batch:
        """The next micro-batch [B, S+1] of this rank."""
        tokens = self._batch(_TRAINING, self.step)
        self.step += 1
        return Batch(tokens=tokens, position={"step": self.step})

    def validation(self, count: int) -> Iterator[Tensor]:
        """Samples of another stream than training's."""
        return (self._batch(_VALIDATION, step) for step in range(count))

    def seek(self, position: dict[str, Any]) -> None:
        """Go on after the given position."""
        self.step = int(position["step"])

    def where(self) -> str:
        """How far reading has come, for a message."""
        return f"step {self.step}"

    def _batch(self, stream: int, step: int) -> Tensor:
        first = (step * self.world_size + self.rank) * self.batch_size
        rows = [self._sample(stream, first + i) for i in range(self.batch_size)]
        return torch.from_numpy(np.stack(rows))

    def _sample(self, stream: int, index: int) -> NDArray[np.int64]:
        key = np.array([self.seed, (index << 1) | stream], dtype=np.uint64)
        random = np.random.Generator(np.random.Philox(key=key))
        if self.kind == "synthetic":
            return random.integers(0, self.vocab_size, self.width, dtype=np.int64)
        jumps = random.choice(_CHAIN_JUMPS, self.width, p=CHAIN_CHANCES).astype(np.int64)
        jumps[0] = random.integers(0, self.vocab_size)
        chain: NDArray[np.int64] = np.cumsum(jumps) % self.vocab_size
        return chain


class PrefetchSource(Source):
    """Reads up to DEPTH batches of `inner` ahead of the training loop.

    A batch may take `timeout_s`; then fetch raises DataStallError. An error of the reading thread
    is raised by the next fetch.
    """

    def __init__(self, inner: Source, *, timeout_s: float) -> None:
        self.inner, self.timeout_s = inner, timeout_s
        self.floor_nats, self.floor_source = inner.floor_nats, inner.floor_source
        self._queue: queue.Queue[Batch | Exception] = queue.Queue(maxsize=DEPTH)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._count = self._waits = self._ready = 0
        self._first_s = self._wait_s = self._longest_s = self._read_s = 0.0

    def fetch(self) -> Batch:
        """The next batch, waiting at most the timeout."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)
            self._thread.start()
        ready, begin = self._queue.qsize(), perf_counter()
        try:
            item = self._queue.get(timeout=self.timeout_s)
        except queue.Empty:
            which = "first batch" if self._count == 0 else f"batch {self._count + 1}"
            raise DataStallError(
                f"data stall: the {which} did not come within {self.timeout_s:g} s "
                f"(--loader-timeout), reading at {self.inner.where()}; run --dataset synthetic "
                "to tell data from training"
            ) from None
        if isinstance(item, Exception):
            raise item
        self._note(ready, perf_counter() - begin)
        return item

    def _note(self, ready: int, waited_s: float) -> None:
        self._count += 1
        if self._count == 1:
            self._first_s = waited_s
            return
        self._ready += ready
        self._waits += not ready
        self._wait_s += waited_s
        self._longest_s = max(self._longest_s, waited_s)

    def statistics(self) -> dict[str, float] | None:
        """Of all batches but the first: how many had to be waited for, and for how long; s.

        ready: batches that lay ready on average, of `depth` at most; read_s: the reader's time.
        """
        later = max(1, self._count - 1)
        return {
            "batches": self._count,
            "first_s": round(self._first_s, 4),
            "waits": self._waits,
            "wait_s": round(self._wait_s, 4),
            "longest_wait_s": round(self._longest_s, 4),
            "read_s": round(self._read_s, 4),
            "ready": round(self._ready / later, 2),
            "depth": DEPTH,
        }

    def where(self) -> str:
        """How far the reader has come."""
        return self.inner.where()

    def validation(self, count: int) -> Iterator[Tensor]:
        """Read directly: evaluation has its own budget."""
        return self.inner.validation(count)

    def seek(self, position: dict[str, Any]) -> None:
        """Go on after the given position; only before the first fetch."""
        self.inner.seek(position)

    def close(self) -> None:
        """End the thread; one that is stuck in reading is left behind after a second.

        A thread of torch's that lives when Python ends may abort the process.
        """
        self._stop.set()
        with suppress(queue.Empty):
            self._queue.get_nowait()  # where it waits for room
        if self._thread is not None:
            self._thread.join(_LEAVE_S)

    def _read(self) -> None:
        try:
            while not self._stop.is_set():
                begin = perf_counter()
                batch = self.inner.fetch()
                self._read_s += perf_counter() - begin
                self._put(batch)
        except Exception as error:  # noqa: BLE001 - handed over to the training thread
            self._put(error)

    def _put(self, item: Batch | Exception) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.5)
                return
            except queue.Full:
                continue
