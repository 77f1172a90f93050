"""Text becomes the tokens that its encoding says, whole and nothing else.

GPT-2's is among the encodings where this machine has the package.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.util import find_spec
from pathlib import Path

import pytest

from nsa.data.text import open_tokenizer
from nsa.tests.corpus import SIGNS

pytestmark = pytest.mark.topic("tokens")


# Of GPT-2's encoding, where this machine has the package.
TOKENIZERS = ["byte", *(["gpt2"] if find_spec("tiktoken") else [])]


def gpt2_by(monkeypatch: pytest.MonkeyPatch, pattern: str, *words: str) -> None:
    """A table of bytes and of these words in place of GPT-2's, which needs the network once.

    tiktoken has others: one of the same bytes gives other tokens.
    """
    import tiktoken

    ranks = {bytes([number]): number for number in range(256)}
    table = tiktoken.Encoding(
        "bytes",
        pat_str=pattern,
        mergeable_ranks=ranks | {word.encode(): 256 + n for n, word in enumerate(words)},
        special_tokens={"<|endoftext|>": 50_256},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": table}.__getitem__)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_separator_that_is_written_out_is_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whoever writes about it ends a document. What stands beside it is not changed either."""
    if name == "gpt2":
        gpt2_by(monkeypatch, r"[^\r\n]+|[\r\n]+")
    tokenizer = open_tokenizer(name)
    text = f"a<|endoftext|>b\r\nc\rd\n\n {SIGNS}"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.separator == {"byte": 0, "gpt2": 50_256}[name]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_text_is_encoded_as_a_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts it has the same bytes, and other tokens where the parts meet.

    Every seven letters are a word here, which no round number of them is a multiple of.
    """
    word, count = "abcdefg", 60_000
    if name == "gpt2":
        gpt2_by(monkeypatch, r"[a-z]{7}|[\s\S]", word)
    wanted = {"byte": list((word * count).encode()), "gpt2": [256] * count}[name]
    assert open_tokenizer(name).encode(word * count) == wanted


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_is_cut_into_words_as_the_encoding_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of GPT-2: a word takes one blank before it with it, other blanks stay together."""
    words = ["it", "'s", "  ", " b", "!?", " 12", "ab", "\n\n", "\n", "it", " \n\n"]
    ranks = [bytes([n]) for n in range(256)]
    ranks += sorted({word.encode() for word in words if len(word) > 1})
    ranks += [b"filler %d" % n for n in range(len(ranks), 50_256)]
    table = tmp_path / "table"
    lines = (f"{base64.b64encode(word).decode()} {n}\n" for n, word in enumerate(ranks))
    table.write_text("".join(lines))
    digest = hashlib.sha256(table.read_bytes()).hexdigest()
    monkeypatch.setattr("nsa.data.text.GPT2_TABLE_SHA256", digest)
    text = "".join(words)
    wanted = {"byte": [*text.encode()], "gpt2": [ranks.index(word.encode()) for word in words]}
    assert open_tokenizer(name, str(table)).encode(text) == wanted[name]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_half_of_a_sign_is_a_question_mark(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON can hold half of a surrogate pair, and web pages do."""
    if name == "gpt2":
        gpt2_by(monkeypatch, r"[\s\S]")
    found = open_tokenizer(name).encode("a\ud83db")
    assert bytes(found) in (b"a?b", "a\ufffdb".encode())
