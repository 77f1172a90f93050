"""Documents reach training whole, in order, once, by one rank, and none that is held out.

The other side is made here from the definition (docs/trainer-contract.md, "Data"), of files that
are written here: tokens are bytes, 0 stands between two documents.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import pytest

from nsa.data.open import open_source
from nsa.data.source import DataError, Source
from nsa.settings import DataSection

DOCUMENTS, SEQ_LEN, ROWS = 90, 16, 2
HELD_OUT_BATCHES, RANKS = 3, (1, 2, 3)


def texts() -> list[str]:
    """Documents of 3 to 60 characters, no two alike, some of letters of two bytes.

    In the first half, which JSON holds, some have blanks and line ends around them, or a NUL.
    """
    words = [f"{n}: {'äß' * (n % 3)}{'abcdefghij' * (n % 6)}".strip() for n in range(DOCUMENTS)]
    odd = {0: "{} \n", 1: "\t {}", 2: "{}\0{}", 3: "{}"}
    return [
        odd[n % 4].format(word, word) if n < DOCUMENTS // 2 else word
        for n, word in enumerate(words)
    ]


def is_held_out(text: str) -> bool:
    """One in ten, by the text's 64-bit BLAKE2b digest as a little-endian number."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return number % 10 == 0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files, which are read in the order of their names: JSON lines, then plain text, which
    lies a folder deeper.
    """
    folder, every = tmp_path_factory.mktemp("documents"), texts()
    half = DOCUMENTS // 2
    lines = (json.dumps({"text": text}) + "\n" for text in every[:half])
    (folder / "a.jsonl").write_text("".join(lines), "utf-8")
    # An empty line ends a document of plain text, whose lines keep their ends.
    (folder / "b").mkdir()
    (folder / "b" / "a.txt").write_text("\n".join(f"{text}\n" for text in every[half:]), "utf-8")
    return folder


def documents_of(rank: int, ranks: int, *, held_out: bool) -> list[bytes]:
    """What the rank has to read: document n is of rank n modulo the ranks."""
    half = DOCUMENTS // 2
    every = [text if n < half else f"{text}\n" for n, text in enumerate(texts())]
    mine = (text for text in every[rank::ranks] if is_held_out(text) == held_out)
    # A NUL of a text would end its document.
    return [text.replace("\0", "").encode() for text in mine]


def batches_of(documents: list[bytes], count: int) -> Iterator[list[list[int]]]:
    """So many batches of the endless stream of these documents; rows overlap by one token."""
    need = count * ROWS * SEQ_LEN + 1
    stream = bytearray(b"\0")
    for document in cycle(documents):
        if len(stream) >= need:
            break
        stream += document + b"\0"
    rows = (list(stream[n * SEQ_LEN :][: SEQ_LEN + 1]) for n in range(count * ROWS))
    return iter([list(islice(rows, ROWS)) for _ in range(count)])


def epoch_batches(documents: list[bytes]) -> int:
    """Batches that go once through the documents, and a quarter of the way again."""
    tokens = sum(len(document) + 1 for document in documents)
    return 5 * tokens // (4 * ROWS * SEQ_LEN)


def opened(corpus: Path, rank: int, ranks: int) -> Source:
    data = DataSection(local_path=str(corpus), tokenizer="byte")
    return open_source(
        data, dataset="local", seq_len=SEQ_LEN, batch_size=ROWS, rank=rank, world_size=ranks, seed=1
    )


SHARES = [(rank, ranks) for ranks in RANKS for rank in range(ranks)]


@pytest.mark.parametrize(("rank", "ranks"), SHARES)
def test_training_reads_its_documents_in_order_and_again(
    corpus: Path, rank: int, ranks: int
) -> None:
    documents = documents_of(rank, ranks, held_out=False)
    assert len(documents) > 0.7 * DOCUMENTS / ranks
    count = epoch_batches(documents)
    source = opened(corpus, rank, ranks)
    try:
        for number, wanted in enumerate(batches_of(documents, count)):
            assert source.fetch().tokens.tolist() == wanted, f"batch {number}"
    finally:
        source.close()


@pytest.mark.parametrize(("rank", "ranks"), SHARES)
def test_evaluation_reads_what_is_held_out_and_the_same_each_time(
    corpus: Path, rank: int, ranks: int
) -> None:
    documents = documents_of(rank, ranks, held_out=True)
    assert documents, "no document of this rank is held out: choose others here"
    wanted = list(batches_of(documents, HELD_OUT_BATCHES))
    source = opened(corpus, rank, ranks)
    try:
        for _ in range(2):
            read = [tokens.tolist() for tokens in source.validation(HELD_OUT_BATCHES)]
            assert read == wanted
            source.fetch()
    finally:
        source.close()


def test_reading_goes_on_where_a_checkpoint_was_written(corpus: Path) -> None:
    """Over the end of an epoch, too."""
    documents = documents_of(1, 2, held_out=False)
    count = epoch_batches(documents)
    wanted = list(batches_of(documents, count))
    for stop in (1, count // 3, count - 2):
        first, second = opened(corpus, 1, 2), opened(corpus, 1, 2)
        try:
            for _ in range(stop):
                position = first.fetch().position
            second.seek(json.loads(json.dumps(position)))
            assert second.fetch().tokens.tolist() == wanted[stop], f"after {stop} batches"
        finally:
            first.close()
            second.close()


def test_reading_does_not_go_on_in_other_files(corpus: Path, tmp_path: Path) -> None:
    """A place among documents means nothing once one of them is another."""
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    first = opened(folder, 0, 1)
    try:
        position = first.fetch().position
    finally:
        first.close()
    last = folder / "b" / "a.txt"
    last.write_bytes(last.read_bytes().replace(b"abcdefghij", b"abcdefghik", 1))
    second = opened(folder, 0, 1)
    try:
        with pytest.raises(DataError, match=r"a\.txt"):
            second.seek(position)
    finally:
        second.close()
