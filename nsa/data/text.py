"""Texts: documents from local files and from the FineWeb-Edu stream, in a fixed order, by rank, and
the tokenizers that make tokens of them: bytes, or GPT-2's encoding.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from nsa.contract import NSAError

SUFFIXES = (".jsonl", ".txt", ".parquet")
FINEWEB_NAME, FINEWEB_SUBSET = "HuggingFaceFW/fineweb-edu", "sample-10BT"
# Read whole where all files together are no larger; else blocks of each, spread evenly over it.
_MOST_BYTES = 1 << 30
_BLOCK_BYTES = 64 << 10
_GPT2_END_OF_TEXT = 50_256
# r50k_base.tiktoken: the table of GPT-2's encoding in one file, as tiktoken itself checks it.
GPT2_TABLE_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2_TABLE_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
# More than it has, of a file that may be anything.
_MOST_TABLE_BYTES = 1 << 24


class DataError(NSAError):
    """The data cannot be read as asked; the message says what to do."""


# Where reading goes on, as JSON can hold it; what it means is its corpus's own affair.
Place = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A document, and the place right after it."""

    text: str
    after: Place


class LocalCorpus:
    """JSONL (one object with a text field per line), parquet (a text column), or plain text.

    `path` is a file or a folder; files are read in the order of their names. In plain text an
    empty line ends a document. Document number n belongs to rank n modulo the number of ranks.
    Raises DataError that says what is missing.
    """

    def __init__(
        self, path: str, *, text_field: str = "text", rank: int = 0, world_size: int = 1
    ) -> None:
        self.text_field, self.rank, self.world_size = text_field, rank, world_size
        self.root, self.files = Path(path), _find(path)
        self._contents: dict[str, str] = {}

    def contents(self) -> dict[str, str]:
        """The digests of the files as they were when first asked for."""
        if not self._contents:
            try:
                self._contents = digests(self.root, self.files)
            except OSError as error:
                raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error
        return self._contents

    def documents(self, place: Place | None = None) -> Iterator[Document]:
        """This rank's documents after a place, or from the start, once."""
        skip = int(place["document"]) if place is not None else 0
        for number, text in islice(enumerate(self._all()), skip, None):
            if number % self.world_size == self.rank:
                yield Document(text=text, after={"document": number + 1})

    def describe(self, place: Place) -> str:
        """The place in words."""
        return f"document {place['document']}"

    def _all(self) -> Iterator[str]:
        for file in self.files:
            if file.suffix == ".jsonl":
                yield from self._jsonl(file)
            elif file.suffix == ".parquet":
                yield from self._parquet(file)
            else:
                yield from _paragraphs(file)

    def _jsonl(self, file: Path) -> Iterator[str]:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line.decode("utf-8"))
                except UnicodeDecodeError as error:
                    raise DataError(f"{file}:{number}: not UTF-8 ({error.reason})") from error
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
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise DataError(
                f"{file}: parquet needs the package pyarrow: pip install 'nsa-runbook[parquet]'"
            ) from error
        try:
            table = parquet.ParquetFile(file)
            if self.text_field not in table.schema_arrow.names:
                raise DataError(
                    f"{file}: no column {self.text_field!r} (it has "
                    f"{', '.join(table.schema_arrow.names)}); set data.text_field"
                )
            for group in table.iter_batches(columns=[self.text_field]):
                yield from (str(text) for text in group.column(0).to_pylist() if text is not None)
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{file}: cannot be read as parquet ({error})") from error


def _find(path: str) -> list[Path]:
    if not path:
        raise DataError("dataset local needs --local-path (a file or a folder)")
    root = Path(path)
    if not root.is_file() and not root.is_dir():
        raise DataError(f"--local-path {path}: no such file or folder")
    found = [root] if root.is_file() else sorted(root.rglob("*"))
    files = [file for file in found if file.suffix in SUFFIXES]
    if not files:
        raise DataError(f"--local-path {path}: holds no {', '.join(SUFFIXES)} file")
    return files


def _paragraphs(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8", errors="replace") as text:
        for is_empty, lines in groupby(text, key=lambda line: not line.strip()):
            if not is_empty:
                yield "".join(lines)


class FinewebCorpus:
    """A rank's share of the FineWeb-Edu sample as a stream; nothing is stored on disk.

    A file belongs to one rank where the files can be shared out evenly; otherwise every rank reads
    all of them and keeps one document of each `world_size`. Raises DataError without the package
    `datasets` or without a network.
    """

    def __init__(self, *, rank: int = 0, world_size: int = 1) -> None:
        self._share = {"rank": rank, "world_size": world_size}
        self._fresh: Any = self._open()

    def _open(self) -> Any:
        try:
            import datasets
            from datasets.distributed import split_dataset_by_node
        except ImportError as error:
            raise DataError(
                "dataset fineweb_edu needs the package datasets: pip install "
                "'nsa-runbook[fineweb]', or read files (data.dataset local, data.local_path)"
            ) from error
        try:
            stream = datasets.load_dataset(
                FINEWEB_NAME, name=FINEWEB_SUBSET, split="train", streaming=True, columns=["text"]
            )
            return split_dataset_by_node(stream, **self._share)
        except Exception as error:
            raise _unreachable(error) from error

    def documents(self, place: Place | None = None) -> Iterator[Document]:
        """This rank's documents after a place, or from the start, once."""
        # One for each reader: a stream's state is that of whoever read it last, and evaluation
        # reads beside training.
        stream, self._fresh = self._fresh or self._open(), None
        if place is not None:
            stream.load_state_dict(place)
        try:
            for record in stream:
                if record["text"] is None:
                    continue
                yield Document(text=str(record["text"]), after=stream.state_dict())
        except OSError as error:
            raise _unreachable(error) from error

    def contents(self) -> dict[str, str]:
        """Nothing: the stream is of a published data set."""
        return {}

    def describe(self, place: Place) -> str:
        """The place in words."""
        while isinstance(place.get("examples_iterable"), dict):
            place = place["examples_iterable"]
        return f"file {place.get('shard_idx')}, document {place.get('shard_example_idx')}"


# A rank's share of a fixed sequence of documents: no other rank has one of them.
Corpus = LocalCorpus | FinewebCorpus


def _unreachable(error: Exception) -> DataError:
    return DataError(
        f"dataset fineweb_edu could not be reached ({type(error).__name__}: {error}); check the "
        "network and HF_ENDPOINT, or read files (data.dataset local, data.local_path)"
    )


def digests(root: Path, files: Sequence[Path], *, most_bytes: int = _MOST_BYTES) -> dict[str, str]:
    """Of each file below `root`, by its name there, its size and the SHA-256 of what it holds.

    Of files that hold more than `most_bytes` together only so much is read: a change between
    two blocks that leaves the size as it is can go unnoticed there. Raises OSError.
    """
    sizes = {file: file.stat().st_size for file in files}
    whole = sum(sizes.values()) <= most_bytes
    blocks = 0 if whole else max(2, most_bytes // _BLOCK_BYTES // len(files))
    return {
        file.relative_to(root).as_posix() if file != root else file.name: _digest(
            file, size, blocks
        )
        for file, size in sizes.items()
    }


def changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Each file that is another one now, that is gone or that came, in words."""
    found = [
        f"{name} {'holds something else' if name in now else 'is gone'}"
        for name, digest in then.items()
        if now.get(name) != digest
    ]
    return [*found, *(f"{name} was not there" for name in now if name not in then)]


def _digest(file: Path, size: int, blocks: int) -> str:
    """`blocks` 0: of the whole file."""
    with file.open("rb") as data:
        if not blocks or size <= blocks * _BLOCK_BYTES:
            return f"{size}:{hashlib.file_digest(data, 'sha256').hexdigest()}"
        digest = hashlib.sha256()
        for number in range(blocks):
            data.seek(number * (size - _BLOCK_BYTES) // (blocks - 1))
            digest.update(data.read(_BLOCK_BYTES))
    return f"{size}:{blocks}:{digest.hexdigest()}"


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
            data = file.read(_MOST_TABLE_BYTES)
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
