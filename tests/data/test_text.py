"""Documents that cannot be read are named; the stream itself is proven by nsa/tests."""

from __future__ import annotations

import json
import os
import shutil
import string
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nsa.data.packing import ByteTokenizer, PackedSource, is_validation, open_tokenizer
from nsa.data.source import DataError
from nsa.data.text import FinewebCorpus, LocalCorpus, Place, changes, digests

# Letters of which a document of five is kept for validation, and the others.
HELD = [c for c in string.ascii_letters if is_validation(c * 5)]
TRAINED = [c for c in string.ascii_letters if c not in HELD]


def in_folder(folder: Path, letters: Sequence[str], **share: int) -> PackedSource:
    """Documents of which each is one letter, five times."""
    path = folder / "letters.jsonl"
    path.write_text("".join(json.dumps({"text": 5 * letter}) + "\n" for letter in letters))
    return PackedSource(LocalCorpus(str(path), **share), ByteTokenizer(), seq_len=8, batch_size=2)


def test_too_few_documents_are_an_error_not_a_hang(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no training document for this rank"):
        in_folder(tmp_path, TRAINED[:1], rank=1, world_size=2).fetch()
    with pytest.raises(DataError, match="no training document for this rank"):
        in_folder(tmp_path, HELD).fetch()
    with pytest.raises(DataError, match="no validation document"):
        list(in_folder(tmp_path, TRAINED).validation(1))


def texts(corpus: LocalCorpus, place: Place | None = None) -> list[str]:
    return [document.text for document in corpus.documents(place)]


def test_a_copy_is_the_same_and_what_is_gone_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(name)
    copied = Path(shutil.copytree(folder, tmp_path / "elsewhere", copy_function=shutil.copyfile))
    then = LocalCorpus(str(folder)).contents()
    assert LocalCorpus(str(copied)).contents() == then
    (copied / "a.txt").unlink()
    assert changes(then, LocalCorpus(str(copied)).contents()) == ["a.txt is gone"]


def test_of_large_files_blocks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    content = bytearray(os.urandom(1 << 20))
    path.write_bytes(content)
    small = 256 << 10  # four blocks
    before = digests(tmp_path, [path], most_bytes=small)
    assert before != digests(tmp_path, [path])
    for other in (bytes([content[0] ^ 1]) + content[1:], content[:-1] + b"?", content + b"x"):
        path.write_bytes(other)
        told = changes(before, digests(tmp_path, [path], most_bytes=small))
        assert told == ["a.txt holds something else"]
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


def test_optional_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(DataError, match=r"tiktoken.*nsa-runbook\[gpt2\]"):
        open_tokenizer("gpt2")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"datasets.*nsa-runbook\[fineweb\]"):
        FinewebCorpus()
