"""The loader's own test, GPT-2's table from a file, and documents turned back into text."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
from collections.abc import Callable
from itertools import islice, product
from pathlib import Path

import pytest

from nsa.data import PackedSource, smoke
from nsa.data.text import (
    ByteTokenizer,
    DataError,
    Gpt2Tokenizer,
    LocalCorpus,
    Tokenizer,
    open_tokenizer,
)
from nsa.settings import DataSection, Share
from nsa.witness.gradient_probe import text_again

WORDS = ["--seq-len", "64", "--batch", "1", "--timeout", "60"]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": f"Document {i}. " * 9}) + "\n" for i in range(40)))
    return path


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of GPT-2's size: every byte, then pairs of bytes. It counts as the known one."""
    pytest.importorskip("tiktoken", reason="the extra gpt2 is not installed")
    tokens = [bytes([b]) for b in range(256)]
    tokens += [bytes(pair) for pair in islice(product(range(256), repeat=2), 50_000)]
    lines = (b"%s %d\n" % (base64.b64encode(token), n) for n, token in enumerate(tokens))
    path = tmp_path / "r50k_base.tiktoken"
    path.write_bytes(b"".join(lines))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr("nsa.data.text.GPT2_TABLE_SHA256", digest)
    return path


def test_the_documented_line_reads_local_documents_with_gpt2(
    documents: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = ["--dataset", "local", "--local-path", str(documents), "--tokenizer", "gpt2"]
    assert smoke.main([*WORDS, *local, "--tokenizer-file", str(table)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tokens"], told["tokenizer"]) == (20 * 64, "gpt2")
    # The pattern cuts before " b"; each piece is one pair in this table.
    tokenizer = open_tokenizer("gpt2", str(table))
    assert tokenizer.encode("aa b") == [256 + 97 * 256 + 97, 256 + 32 * 256 + 98]
    assert 0 < told["slowest_s"] <= told["seconds"] + 0.001


def test_another_table_is_refused(table: Path, documents: Path) -> None:
    """One that is cut off, and one that no memory holds."""
    for size in (table.stat().st_size - 40, 1 << 40):
        os.truncate(table, size)
        with pytest.raises(DataError, match="not GPT-2's table"):
            open_tokenizer("gpt2", str(table))
    with pytest.raises(DataError, match="No such file"):
        open_tokenizer("gpt2", str(table.parent / "nowhere"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dataset", "local", "--batch", "0", "--timeout", "0"], "--batch 0: must be 1 or more"),
        (["--timeout", "inf"], "--timeout inf: must be a number of seconds"),
    ],
)
def test_what_cannot_be_read_is_said(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert smoke.main([*words, "--tokenizer", "byte"]) == 2
    assert said in capfd.readouterr().err


def test_opening_counts_against_the_timeout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    never = threading.Event()
    monkeypatch.setattr(smoke, "open_source", lambda *_, **__: never.wait(30))
    assert smoke.main(["--tokenizer", "byte", "--timeout", "0.1"]) == 1
    assert "fineweb_edu was not open after 0.1 s (--timeout)" in capfd.readouterr().err
    never.set()


TEXTS = [f"Document {n}: Straße, NUL \0, half a pair \ud800, <|endoftext|>." for n in range(30)]


def source(folder: Path, tokenizer: Tokenizer) -> PackedSource:
    path = folder / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return PackedSource(LocalCorpus(str(path)), tokenizer, Share(seq_len=100, batch_size=3))


@pytest.mark.parametrize("name", ["byte", "gpt2"])
@pytest.mark.parametrize(
    ("change", "apart"),
    [(None, False), (str.lower, True), (lambda text: text.replace("ß", "ss"), True)],
)
def test_a_tokenizer_that_changes_the_text_is_seen(
    name: str,
    change: Callable[[str], str] | None,
    apart: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    file = str(request.getfixturevalue("table")) if name == "gpt2" else ""
    if change is not None:
        kind = Gpt2Tokenizer if name == "gpt2" else ByteTokenizer
        true = kind.encode
        monkeypatch.setattr(kind, "encode", lambda self, text: true(self, change(text)))
    reading = source(tmp_path, open_tokenizer(name, file))
    data = DataSection(tokenizer=name, tokenizer_file=file)
    first, second = reading.fetch(), reading.fetch()
    told = text_again(first, data)
    assert told is not None
    assert told["documents"] >= 3 and told["bytes"] >= 301
    assert (told["read"] != told["decoded"]) is apart
    assert (told["apart"] is not None) is apart
    assert text_again(second, data) is None
    reading.seek(first.position)
    assert text_again(reading.fetch(), data) is None, "goes on from a checkpoint"
