"""Documents packed into fixed-length sequences, some kept for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa.data.source import Batch, DataError, Source
from nsa.data.text import Corpus, Document, Place, changes
from nsa.data.tokenizers import Tokenizer

# Of so many documents about one is only ever read for validation.
VALIDATION_EVERY = 10
_NAMED = 3


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

    def __init__(
        self, corpus: Corpus, tokenizer: Tokenizer, *, seq_len: int, batch_size: int
    ) -> None:
        self.corpus, self.tokenizer = corpus, tokenizer
        self.seq_len, self.batch_size = seq_len, batch_size
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
