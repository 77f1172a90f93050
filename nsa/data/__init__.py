"""What every source gives: batches, and the position from which it can go on.

Three are here: one that generates tokens, one that packs documents into sequences and keeps some
of them for validation, and one that reads another ahead; `open_source` makes what a config asks
for. Generated tokens are uniform noise, or a Markov chain whose entropy rate is known. Samples are
numbered over the whole run. Sample i depends on the seed and i alone, so N ranks together see
exactly the batch that one rank alone would see.
"""

from __future__ import annotations

import hashlib
import math
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa.data.text import (
    Corpus,
    DataError,
    Document,
    FinewebCorpus,
    LocalCorpus,
    Place,
    Tokenizer,
    changes,
    open_tokenizer,
)
from nsa.settings import VOCAB_SIZES, DataSection, Share

# Batches read ahead of the training loop.
DEPTH = 4
# Reading stops at once unless a disk or a network is stuck.
_LEAVE_S = 1.0
# Chance of each successor, the same for every state, so the entropy rate is that of this list.
CHAIN_CHANCES = (0.55, 0.25, 0.15, 0.05)
# Below the size of every vocabulary.
_CHAIN_JUMPS = (7, 60, 101, 173)
_TRAINING, _VALIDATION = 0, 1
# Of so many documents about one is only ever read for validation.
VALIDATION_EVERY = 10
_NAMED = 3


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


def is_validation(text: str) -> bool:
    """Is this document kept from training?

    Its text alone decides: a copy of it is kept too, whichever file, rank or epoch it is in.
    """
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VALIDATION_EVERY == 0


class PackedSource(Source):
    """Batches [B, S+1] of one rank from its share of a corpus.

    Documents are joined with a separator and cut into windows that overlap by one token, so that
    every token is predicted once. The corpus starts again when it ends.
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, share: Share) -> None:
        self.corpus, self.tokenizer = corpus, tokenizer
        self.seq_len, self.batch_size = share.seq_len, share.batch_size
        self.epoch = 0
        self.place: Place | None = None
        self.rest: list[int] = [tokenizer.separator]
        self._open: Iterator[Document] | None = None
        self._gave_in_epoch = False
        self._held: list[Tensor] = []
        # Of documents that go on from a checkpoint, the first one is not read from its beginning.
        self._texts: list[str] | None = []

    def fetch(self) -> Batch:
        """The next batch; reads as many documents as it needs."""
        need = self.batch_size * self.seq_len + 1
        while len(self.rest) < need:
            self._read_document()
        tokens = _windows(self.rest, self.batch_size, self.seq_len)
        self.rest = self.rest[need - 1 :]
        position = {
            "epoch": self.epoch,
            "place": self.place,
            "rest": list(self.rest),
            "contents": self.corpus.contents(),
        }
        texts, self._texts = tuple(self._texts or ()), None
        return Batch(tokens=tokens, position=position, texts=texts)

    def validation(self, count: int) -> Iterator[Tensor]:
        """The first `count` batches of this rank's validation documents; read once, then kept."""
        if len(self._held) < count:
            self._held = list(self._read_validation(count))
        return iter(self._held[:count])

    def seek(self, position: dict[str, Any]) -> None:
        """Go on after the given position. Raises DataError where it is one in other files."""
        if changed := changes(position["contents"], self.corpus.contents()):
            more = f" (and {len(changed) - _NAMED} more)" if changed[_NAMED:] else ""
            raise DataError(
                f"the data changed since the checkpoint was written: {', '.join(changed[:_NAMED])}"
                f"{more}; put back what the run read, or begin a new one"
            )
        self.epoch, self.place = int(position["epoch"]), position["place"]
        self.rest = [int(token) for token in position["rest"]]
        self._open, self._texts = None, None

    def close(self) -> None:
        """Let go of the open file."""
        self._open = None

    def where(self) -> str:
        """How far reading has come, for a message."""
        return f"epoch {self.epoch}, {self.corpus.describe(self.place) if self.place else 'start'}"

    def _read_validation(self, count: int) -> Iterator[Tensor]:
        need = self.batch_size * self.seq_len + 1
        tokens: list[int] = [self.tokenizer.separator]
        made = 0
        for text in self._validation_texts():
            tokens += [*self.tokenizer.encode(text), self.tokenizer.separator]
            while len(tokens) >= need and made < count:
                yield _windows(tokens, self.batch_size, self.seq_len)
                tokens = tokens[need - 1 :]
                made += 1
            if made == count:
                return

    def _validation_texts(self) -> Iterator[str]:
        """This rank's validation documents, over and over; none is an error."""
        while True:
            any_text = False
            for document in self.corpus.documents():
                if is_validation(document.text):
                    any_text = True
                    yield document.text
            if not any_text:
                raise DataError(
                    "no validation document for this rank: about one document in "
                    f"{VALIDATION_EVERY} is kept for it; give more documents, or eval_every: 0"
                )

    def _read_document(self) -> None:
        if self._open is None:
            self._open = self.corpus.documents(self.place)
            self._gave_in_epoch = self.place is not None
        document = next(self._open, None)
        if document is None:
            if not self._gave_in_epoch:
                raise DataError(
                    "no training document for this rank: give more documents than there are ranks"
                )
            self.epoch, self.place, self._open = self.epoch + 1, None, None
            return
        self.place = document.after
        if not is_validation(document.text):
            self._gave_in_epoch = True
            if self._texts is not None:
                self._texts.append(document.text)
            self.rest += [*self.tokenizer.encode(document.text), self.tokenizer.separator]


def _windows(tokens: list[int], batch_size: int, seq_len: int) -> Tensor:
    flat = np.asarray(tokens[: batch_size * seq_len + 1], dtype=np.int64)
    rows = [flat[i * seq_len : (i + 1) * seq_len + 1] for i in range(batch_size)]
    return torch.from_numpy(np.stack(rows))


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
        self._count = 0

    def fetch(self) -> Batch:
        """The next batch, waiting at most the timeout."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)
            self._thread.start()
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
        self._count += 1
        return item

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
                self._queue.put(self.inner.fetch())
        except Exception as error:  # noqa: BLE001 - handed over to the training thread
            self._queue.put(error)


def open_source(data: DataSection, share: Share) -> Source:
    """The source of one rank. Raises DataError."""
    if data.dataset in ("synthetic", "markov"):
        return GeneratedSource(data.dataset, VOCAB_SIZES[data.tokenizer], share)
    corpus: Corpus
    of = {"rank": share.rank, "world_size": share.world_size}
    if data.dataset == "local":
        corpus = LocalCorpus(data.local_path, text_field=data.text_field, **of)
    else:
        corpus = FinewebCorpus(**of)
    tokenizer = open_tokenizer(data.tokenizer, data.tokenizer_file)
    packed = PackedSource(corpus, tokenizer, share)
    return PrefetchSource(packed, timeout_s=data.loader_timeout_s)
