"""The source that a config asks for, and those that are generated.

Generated tokens are uniform noise, or a Markov chain whose entropy rate is known. Samples are
numbered over the whole run. Sample i depends on the seed and i alone, so N ranks together see
exactly the batch that one rank alone would see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa.data.packing import PackedSource, open_tokenizer
from nsa.data.source import Batch, DataError, PrefetchSource, Source
from nsa.data.text import Corpus, FinewebCorpus, LocalCorpus
from nsa.settings import VOCAB_SIZES, DataSection, Share

# Chance of each successor, the same for every state, so the entropy rate is that of this list.
CHAIN_CHANCES = (0.55, 0.25, 0.15, 0.05)
_CHAIN_JUMPS = (7, 60, 101, 173)
_TRAINING, _VALIDATION = 0, 1


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
    packed = PackedSource(
        corpus,
        open_tokenizer(data.tokenizer, data.tokenizer_file),
        seq_len=share.seq_len,
        batch_size=share.batch_size,
    )
    return PrefetchSource(packed, timeout_s=data.loader_timeout_s)
