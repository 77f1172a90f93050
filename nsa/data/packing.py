"""The source that a config asks for: generated, or of text.

Text becomes tokens (bytes, or GPT-2's encoding), packed into sequences, some kept for validation.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa.data.source import Batch, DataError, GeneratedSource, PrefetchSource, Source
from nsa.data.text import Corpus, Document, FinewebCorpus, LocalCorpus, Place, changes
from nsa.settings import VOCAB_SIZES, DataSection, Share

_GPT2_END_OF_TEXT = 50_256
# r50k_base.tiktoken: the table of GPT-2's encoding in one file, as tiktoken itself checks it.
GPT2_TABLE_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2_TABLE_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
# More than it has, of a file that may be anything.
_MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes. Byte 0 never occurs in text, so it separates documents."""

    separator: int = 0

    def encode(self, text: str) -> list[int]:
        """The bytes of the text, NUL characters left out."""
        return list(text.replace("\0", "").encode("utf-8", "replace"))


class Gpt2Tokenizer:
    """GPT-2's encoding, its table from a file or through tiktoken's own cache and the network.

    Raises DataError where tiktoken or the table cannot be had, or the file is another table.
    """

    separator = _GPT2_END_OF_TEXT

    def __init__(self, table: str = "") -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise DataError(
                "tokenizer gpt2 needs the package tiktoken: pip install 'nsa-runbook[gpt2]', or "
                "use `data: {tokenizer: byte}`"
            ) from error
        if table:
            self._encoding = _from_file(tiktoken, Path(table))
            return
        try:
            self._encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:
            raise DataError(
                f"tokenizer gpt2 could not load its table ({error}); without a network fetch "
                f"{GPT2_TABLE_URL} elsewhere and set data.tokenizer_file to it, or use "
                "`data: {tokenizer: byte}`"
            ) from error

    def decode(self, tokens: list[int]) -> bytes:
        """What tiktoken's own table has for these tokens."""
        found: bytes = self._encoding.decode_bytes(tokens)
        return found

    def encode(self, text: str) -> list[int]:
        """Tokens of the text; special tokens in it are read as plain text."""
        tokens: list[int] = self._encoding.encode_ordinary(text)
        return tokens


def _from_file(tiktoken: Any, path: Path) -> Any:
    from tiktoken_ext.openai_public import r50k_pat_str

    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES)
    except OSError as error:
        raise DataError(f"data.tokenizer_file {path}: {error.strerror or error}") from error
    found = hashlib.sha256(data).hexdigest()
    if found != GPT2_TABLE_SHA256:
        raise DataError(
            f"data.tokenizer_file {path}: not GPT-2's table (sha256 {found[:16]}..., "
            f"r50k_base.tiktoken has {GPT2_TABLE_SHA256[:16]}...); fetch {GPT2_TABLE_URL}"
        )
    pairs = (line.split() for line in data.splitlines() if line)
    return tiktoken.Encoding(
        name="gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in pairs},
        special_tokens={"<|endoftext|>": _GPT2_END_OF_TEXT},
        explicit_n_vocab=_GPT2_END_OF_TEXT + 1,
    )


Tokenizer = ByteTokenizer | Gpt2Tokenizer


def open_tokenizer(name: str, table: str = "") -> Tokenizer:
    """The tokenizer of a config's `data.tokenizer` and `data.tokenizer_file`."""
    return ByteTokenizer() if name == "byte" else Gpt2Tokenizer(table)


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
