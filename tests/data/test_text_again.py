"""What a tokenizer makes of documents, turned back, against the documents as they were read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nsa.data.packing import ByteTokenizer, Gpt2Tokenizer, PackedSource, Tokenizer, open_tokenizer
from nsa.data.text import LocalCorpus
from nsa.settings import DataSection
from nsa.witness.gradient_probe import text_again
from tests.data.test_smoke import table  # noqa: F401 - a fixture

TEXTS = [f"Document {n}: Straße, NUL \0, half a pair \ud800, <|endoftext|>." for n in range(30)]


def source(folder: Path, tokenizer: Tokenizer) -> PackedSource:
    path = folder / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return PackedSource(LocalCorpus(str(path)), tokenizer, seq_len=100, batch_size=3)


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


def test_what_goes_on_from_a_checkpoint_is_not_turned_back(tmp_path: Path) -> None:
    begun, goes_on = (source(tmp_path, ByteTokenizer()) for _ in range(2))
    goes_on.seek(begun.fetch().position)
    assert text_again(goes_on.fetch(), DataSection(tokenizer="byte")) is None
