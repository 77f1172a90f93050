"""Documents packed into fixed-length sequences, shared out to ranks, some kept for validation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa.data.source import Batch, DataError
from nsa.data.text import Corpus, Tokenizer

# Every tenth document is only ever read for validation.
VALIDATION_EVERY = 10


def is_validation(document: int) -> bool:
    """Is the document of this number kept from training?"""
    return document % VALIDATION_EVERY == VALIDATION_EVERY - 1


class PackedSource:
    """Batches [B, S+1] of one rank from a corpus.

    Training document number j (counted without the validation ones) belongs to rank j modulo the
    number of ranks. Documents are joined with a separator and cut into windows that overlap by
    one token, so that every token is predicted once. The corpus starts again when it ends.
    """

    floor_nats: float | None = None
    floor_source = "unknown: real text"

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        batch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.corpus, self.tokenizer = corpus, tokenizer
        self.seq_len, self.batch_size = seq_len, batch_size
        self.rank, self.world_size = rank, world_size
        self.epoch, self.document = 0, 0
        self.rest: list[int] = [tokenizer.separator]
        self._open: Iterator[str] | None = None
        self._gave_in_epoch = False

    def fetch(self) -> Batch:
        """The next batch; reads as many documents as it needs."""
        need = self.batch_size * self.seq_len + 1
        while len(self.rest) < need:
            self._read_document()
        tokens = _windows(self.rest, self.batch_size, self.seq_len)
        self.rest = self.rest[need - 1 :]
        position = {"epoch": self.epoch, "document": self.document, "rest": list(self.rest)}
        return Batch(tokens=tokens, position=position)

    def validation(self, count: int) -> Iterator[Tensor]:
        """The first `count` batches of this rank's share of the validation documents."""
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

    def seek(self, position: dict[str, Any]) -> None:
        """Go on after the given position."""
        self.epoch, self.document = int(position["epoch"]), int(position["document"])
        self.rest = [int(token) for token in position["rest"]]
        self._open = None

    def close(self) -> None:
        """Let go of the open file."""
        self._open = None

    def _validation_texts(self) -> Iterator[str]:
        """This rank's validation documents, over and over; none is an error."""
        for rounds in range(1_000_000):
            numbered = enumerate(self.corpus.documents(0))
            held = (text for number, text in numbered if is_validation(number))
            any_text = False
            for text in islice(held, self.rank, None, self.world_size):
                any_text = True
                yield text
            if not any_text:
                raise DataError(
                    f"round {rounds + 1}: no validation document for rank {self.rank}: give at "
                    f"least {VALIDATION_EVERY * self.world_size} documents, or eval_every: 0"
                )

    def _read_document(self) -> None:
        if self._open is None:
            self._open = self.corpus.documents(self.document)
            self._gave_in_epoch = self.document > 0
        text = next(self._open, None)
        if text is None:
            if not self._gave_in_epoch:
                raise DataError(
                    f"no training document for rank {self.rank} of {self.world_size}: give at "
                    f"least {self.world_size + 1} documents"
                )
            self.epoch, self.document, self._open = self.epoch + 1, 0, None
            return
        number, self.document = self.document, self.document + 1
        trained_before = number - number // VALIDATION_EVERY
        if not is_validation(number) and trained_before % self.world_size == self.rank:
            self._gave_in_epoch = True
            self.rest += [*self.tokenizer.encode(text), self.tokenizer.separator]


def _windows(tokens: list[int], batch_size: int, seq_len: int) -> Tensor:
    flat = np.asarray(tokens[: batch_size * seq_len + 1], dtype=np.int64)
    rows = [flat[i * seq_len : (i + 1) * seq_len + 1] for i in range(batch_size)]
    return torch.from_numpy(np.stack(rows))
