"""Text to tokens: bytes (built in) or GPT-2's byte-pair encoding through tiktoken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nsa.data.batch import DataError

_GPT2_END_OF_TEXT = 50_256


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
    """GPT-2's encoding. Raises DataError where tiktoken or its table cannot be had."""

    separator = _GPT2_END_OF_TEXT

    def __init__(self) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise DataError(
                "tokenizer gpt2 needs the package tiktoken: pip install 'nsa-runbook[gpt2]', or "
                "use `data: {tokenizer: byte}`"
            ) from error
        try:
            self._encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:
            raise DataError(
                f"tokenizer gpt2 could not load its table ({error}); without a network put it "
                "into the folder that TIKTOKEN_CACHE_DIR names, or use `data: {tokenizer: byte}`"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Tokens of the text; special tokens in it are read as plain text."""
        tokens: list[int] = self._encoding.encode_ordinary(text)
        return tokens


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a config's `data.tokenizer`."""
    return ByteTokenizer() if name == "byte" else Gpt2Tokenizer()
