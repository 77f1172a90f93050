"""Text to tokens: bytes, and GPT-2's encoding."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nsa.data.source import DataError

_GPT2_END_OF_TEXT = 50_256
# r50k_base.tiktoken: the table of GPT-2's encoding in one file, as tiktoken itself checks it.
GPT2_TABLE_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2_TABLE_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"


class Tokenizer(Protocol):
    """Encodes documents."""

    @property
    def separator(self) -> int:
        """The token between two documents."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a document, without separators."""


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
        data = path.read_bytes()
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


def open_tokenizer(name: str, table: str = "") -> Tokenizer:
    """The tokenizer of a config's `data.tokenizer` and `data.tokenizer_file`."""
    return ByteTokenizer() if name == "byte" else Gpt2Tokenizer(table)
