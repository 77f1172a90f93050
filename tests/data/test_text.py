"""Documents: really read, shared out by rank, separated, some only for validation."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nsa.data.packing import PackedSource, is_validation
from nsa.data.source import DataError
from nsa.data.text import ByteTokenizer, FinewebCorpus, LocalCorpus, open_tokenizer


class Numbered:
    """Document i is the letter chr(65 + i), `length` times."""

    def __init__(self, count: int, length: int = 5) -> None:
        self.texts = [chr(65 + i) * length for i in range(count)]

    def documents(self, skip: int) -> Iterator[str]:
        return iter(self.texts[skip:])


def packed(corpus: object, *, rank: int = 0, world_size: int = 1, batch: int = 2) -> PackedSource:
    return PackedSource(
        corpus,  # type: ignore[arg-type]
        ByteTokenizer(),
        seq_len=8,
        batch_size=batch,
        rank=rank,
        world_size=world_size,
    )


def letters(source: PackedSource, batches: int) -> set[str]:
    seen: set[str] = set()
    for _ in range(batches):
        seen |= set(bytes(source.fetch().tokens.flatten().tolist()).decode())
    return seen - {"\0"}


def test_windows_overlap_by_one_so_every_token_is_predicted_once() -> None:
    one = packed(Numbered(20))
    stream = b"".join(b"\0" + chr(65 + i).encode() * 5 for i in range(20) if i % 10 != 9)
    targets = torch.cat([one.fetch().tokens[:, 1:].flatten() for _ in range(3)])
    assert bytes(targets.tolist()) == stream[1 : 1 + 48]


def test_documents_are_separated() -> None:
    first = bytes(packed(Numbered(20), batch=1).fetch().tokens.flatten().tolist())
    assert first == b"\0AAAAA\0BB"


def test_ranks_share_documents_without_overlap_and_never_touch_validation() -> None:
    corpus = Numbered(20)
    # 18 training documents of 6 tokens, 9 per rank: 3 batches of 16 tokens are within one epoch.
    per_rank = [letters(packed(corpus, rank=r, world_size=2), 3) for r in range(2)]
    assert not per_rank[0] & per_rank[1]
    held = {chr(65 + i) for i in range(20) if is_validation(i)}
    assert held == {"J", "T"}
    assert not held & (per_rank[0] | per_rank[1])


def test_validation_reads_only_validation_documents() -> None:
    seen = bytes(torch.cat(list(packed(Numbered(20)).validation(2))).flatten().tolist()).decode()
    assert set(seen) == {"J", "T", "\0"}


def test_training_goes_on_after_the_last_document() -> None:
    one = packed(Numbered(11))
    for _ in range(12):
        one.fetch()
    assert one.epoch >= 2


def test_seek_goes_on_token_for_token() -> None:
    straight, resumed = packed(Numbered(30)), packed(Numbered(30))
    for _ in range(4):
        position = straight.fetch().position
    resumed.seek(json.loads(json.dumps(position)))
    for _ in range(5):
        assert torch.equal(straight.fetch().tokens, resumed.fetch().tokens)


def test_too_few_documents_are_an_error_not_a_hang() -> None:
    with pytest.raises(DataError, match="no training document for rank 1"):
        packed(Numbered(1), rank=1, world_size=2).fetch()
    with pytest.raises(DataError, match="no validation document"):
        list(packed(Numbered(5)).validation(1))


def test_jsonl_is_read(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "second"}\n\n{"text": "third"}\n')
    (tmp_path / "a.txt").write_text("first\nline\n\nzero\n")
    corpus = LocalCorpus(str(tmp_path))
    assert list(corpus.documents(0)) == ["first\nline\n", "zero\n", "second", "third"]
    assert list(corpus.documents(3)) == ["third"]


@pytest.mark.parametrize("line", ['{"body": "x"}', "[1]", "{broken", '{"text": 3}'])
def test_bad_jsonl_names_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"d\.jsonl:2"):
        list(LocalCorpus(str(path)).documents(0))


def test_other_text_fields(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"body": "x"}\n')
    assert list(LocalCorpus(str(path), text_field="body").documents(0)) == ["x"]


def test_parquet_is_read_or_its_package_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        path.write_bytes(b"PAR1")
        with pytest.raises(DataError, match=r"pyarrow.*nsa-runbook\[parquet\]"):
            list(LocalCorpus(str(path)).documents(0))
        return
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), path)
    assert list(LocalCorpus(str(path)).documents(1)) == ["b"]
    with pytest.raises(DataError, match="no column 'body'"):
        list(LocalCorpus(str(path), text_field="body").documents(0))


@pytest.mark.parametrize(("path", "words"), [("", "needs --local-path"), ("nowhere", "no such")])
def test_missing_paths_are_named(path: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        LocalCorpus(path)


def test_a_folder_without_documents_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\.jsonl, \.txt, \.parquet"):
        LocalCorpus(str(tmp_path))


def test_byte_tokenizer_never_emits_the_separator() -> None:
    one = ByteTokenizer()
    assert one.encode("a\0é") == [97, 0xC3, 0xA9]
    assert one.separator == 0


def test_optional_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(DataError, match=r"tiktoken.*nsa-runbook\[gpt2\]"):
        open_tokenizer("gpt2")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"datasets.*nsa-runbook\[fineweb\]"):
        FinewebCorpus()
