"""Documents from local files and from the FineWeb-Edu stream in a fixed order, and their tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from nsa.data.source import DataError

_GPT2_END_OF_TEXT = 50_256
SUFFIXES = (".jsonl", ".txt", ".parquet")
FINEWEB_NAME, FINEWEB_SUBSET = "HuggingFaceFW/fineweb-edu", "sample-10BT"


class Corpus(Protocol):
    """A fixed sequence of documents."""

    def documents(self, skip: int) -> Iterator[str]:
        """All documents from number `skip` on, once."""


class LocalCorpus:
    """JSONL (one object with a text field per line), parquet (a text column), or plain text.

    `path` is a file or a folder; files are read in the order of their names. In plain text an
    empty line ends a document. Raises DataError that says what is missing.
    """

    def __init__(self, path: str, *, text_field: str = "text") -> None:
        self.text_field = text_field
        self.files = _find(path)

    def documents(self, skip: int) -> Iterator[str]:
        """All documents from number `skip` on, once."""
        return islice(self._all(), skip, None)

    def _all(self) -> Iterator[str]:
        for file in self.files:
            if file.suffix == ".jsonl":
                yield from self._jsonl(file)
            elif file.suffix == ".parquet":
                yield from self._parquet(file)
            else:
                yield from _paragraphs(file)

    def _jsonl(self, file: Path) -> Iterator[str]:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{file}:{number}: not JSON ({error.msg})") from error
                text = record.get(self.text_field) if isinstance(record, dict) else None
                if not isinstance(text, str):
                    raise DataError(
                        f"{file}:{number}: no text under {self.text_field!r}; set data.text_field"
                    )
                yield text

    def _parquet(self, file: Path) -> Iterator[str]:
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise DataError(
                f"{file}: parquet needs the package pyarrow: pip install 'nsa-runbook[parquet]'"
            ) from error
        table = parquet.ParquetFile(file)
        if self.text_field not in table.schema_arrow.names:
            raise DataError(
                f"{file}: no column {self.text_field!r} (it has "
                f"{', '.join(table.schema_arrow.names)}); set data.text_field"
            )
        for group in table.iter_batches(columns=[self.text_field]):
            yield from (str(text) for text in group.column(0).to_pylist() if text is not None)


def _find(path: str) -> list[Path]:
    if not path:
        raise DataError("dataset local needs --local-path (a file or a folder)")
    root = Path(path)
    if root.is_file():
        files = [root]
    elif root.is_dir():
        files = sorted(file for file in root.rglob("*") if file.suffix in SUFFIXES)
    else:
        raise DataError(f"--local-path {path}: no such file or folder")
    files = [file for file in files if file.suffix in SUFFIXES]
    if not files:
        raise DataError(f"--local-path {path}: holds no {', '.join(SUFFIXES)} file")
    return files


def _paragraphs(file: Path) -> Iterator[str]:
    lines: list[str] = []
    with file.open(encoding="utf-8", errors="replace") as text:
        for line in text:
            if line.strip():
                lines.append(line)
            elif lines:
                yield "".join(lines)
                lines = []
    if lines:
        yield "".join(lines)


class FinewebCorpus:
    """The FineWeb-Edu sample as a stream; nothing is stored on disk.

    Raises DataError without the package `datasets` or without a network.
    """

    def __init__(self) -> None:
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                "dataset fineweb_edu needs the package datasets: pip install "
                "'nsa-runbook[fineweb]', or use --dataset local or synthetic"
            ) from error
        try:
            self._stream = datasets.load_dataset(
                FINEWEB_NAME, name=FINEWEB_SUBSET, split="train", streaming=True
            )
        except Exception as error:
            raise _unreachable(error) from error

    def documents(self, skip: int) -> Iterator[str]:
        """All documents from number `skip` on, once."""
        try:
            for record in self._stream.skip(skip):
                yield str(record["text"])
        except OSError as error:
            raise _unreachable(error) from error


def _unreachable(error: Exception) -> DataError:
    return DataError(
        f"dataset fineweb_edu could not be reached ({type(error).__name__}: {error}); check the "
        "network and HF_ENDPOINT, or use --dataset local --local-path PATH, or --dataset "
        "synthetic; --synthetic-on-fail goes on with synthetic data and says so in env.json"
    )


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
