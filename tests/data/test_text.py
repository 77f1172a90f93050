"""Documents that cannot be read are named; the stream itself is proven by nsa/tests."""

from __future__ import annotations

import os
import string
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from nsa.data.packing import ByteTokenizer, PackedSource, is_validation, open_tokenizer
from nsa.data.source import DataError
from nsa.data.text import Corpus, FinewebCorpus, LocalCorpus, Place, changes, digests

# Letters of which a document of five is kept for validation, and the others.
HELD = [c for c in string.ascii_letters if is_validation(c * 5)]
TRAINED = [c for c in string.ascii_letters if c not in HELD]


class Lettered:
    """A rank's documents: each is one letter, five times."""

    def __init__(self, letters: Sequence[str], rank: int = 0, world_size: int = 1) -> None:
        self.letters, self.rank, self.world_size = letters, rank, world_size
        self.read = 0

    def contents(self) -> dict[str, str]:
        return {}

    def describe(self, place: Place) -> str:
        return f"document {place['document']}"


def packed(corpus: Corpus, *, batch: int = 2) -> PackedSource:
    return PackedSource(corpus, ByteTokenizer(), seq_len=8, batch_size=batch)


def test_validation_documents_are_read_once() -> None:
    corpus = Lettered(string.ascii_letters)
    source = packed(corpus)
    first, read = list(source.validation(2)), corpus.read
    assert all(torch.equal(a, b) for a, b in zip(first, source.validation(2), strict=True))
    assert corpus.read == read


def test_too_few_documents_are_an_error_not_a_hang() -> None:
    with pytest.raises(DataError, match="no training document for this rank"):
        packed(Lettered(TRAINED[:1], rank=1, world_size=2)).fetch()
    with pytest.raises(DataError, match="no training document for this rank"):
        packed(Lettered(HELD)).fetch()
    with pytest.raises(DataError, match="no validation document"):
        list(packed(Lettered(TRAINED)).validation(1))


def texts(corpus: LocalCorpus, place: Place | None = None) -> list[str]:
    return [document.text for document in corpus.documents(place)]


def test_of_large_files_blocks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    content = bytearray(os.urandom(1 << 20))
    path.write_bytes(content)
    small = 256 << 10  # four blocks
    before = digests(tmp_path, [path], most_bytes=small)
    assert before != digests(tmp_path, [path])
    for at in (0, len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert changes(before, digests(tmp_path, [path], most_bytes=small)) == [
            "a.txt holds something else"
        ]
    path.write_bytes(content + b"x")
    assert changes(before, digests(tmp_path, [path], most_bytes=small))
    path.write_bytes(content)
    assert changes(before, digests(tmp_path, [path], most_bytes=small)) == []


@pytest.mark.parametrize(
    ("line", "why"),
    [(b'{"body": "x"}', "no text under 'text'; set data.text_field"), (b"[1]", "no text under"),
     (b"{broken", "not JSON"), (b'{"text": 3}', "no text under"),
     ('{"text": "caf\u00e9"}'.encode("latin-1"), "not UTF-8")],
)  # fmt: skip
def test_bad_jsonl_names_file_and_line(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"d\.jsonl:2: {why}"):
        texts(LocalCorpus(str(path)))
    path.write_text('{"body": "x"}\n')
    assert texts(LocalCorpus(str(path), text_field="body")) == ["x"]


def test_parquet_is_read_or_its_package_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        path.write_bytes(b"PAR1")
        with pytest.raises(DataError, match=r"pyarrow.*nsa-runbook\[parquet\]"):
            texts(LocalCorpus(str(path)))
        return
    for broken in (b"PAR1", b"", b"PAR1" + b"x" * 40 + b"PAR1"):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"d\.parquet: cannot be read as parquet \("):
            texts(LocalCorpus(str(path)))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), path)
    assert texts(LocalCorpus(str(path)), {"document": 1}) == ["b"]
    with pytest.raises(DataError, match="no column 'body'"):
        texts(LocalCorpus(str(path), text_field="body"))


@pytest.mark.parametrize(("path", "words"), [("", "needs --local-path"), ("nowhere", "no such")])
def test_missing_paths_are_named(path: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        LocalCorpus(path)


def test_a_folder_without_documents_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\.jsonl, \.txt, \.parquet"):
        LocalCorpus(str(tmp_path))


def test_optional_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(DataError, match=r"tiktoken.*nsa-runbook\[gpt2\]"):
        open_tokenizer("gpt2")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"datasets.*nsa-runbook\[fineweb\]"):
        FinewebCorpus()
