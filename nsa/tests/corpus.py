"""Documents that are written to files here, and what a rank has to read of them, by definition.

The definition is docs/trainer-contract.md, "Data": tokens are bytes, 0 stands between two
documents. Parquet is among the files where this machine has the package. `opened` reads them; a
module of tests takes the fixtures by name.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nsa.data import Source, open_source
from nsa.settings import DataSection, Share
from nsa.tests.built import as_typed

# A batch has more rows than two, and a number of its own.
SEQ_LEN, ROWS = 16, 5
# What a text may hold that is easily taken for something else: both cases of every letter, signs,
# blanks of several kinds, letters that have more than one form, signs beyond 16 bits.
SIGNS = (
    "".join(map(chr, range(33, 127))) + "\u00a0ÄäÉe\u0301ßﬁ…“”‘ıİΩµ１²\u200b\ufeff\u2028😀\t\v  "
)
# Not what the config says by itself: another text stands there.
FIELD = "body"
# Where documents lie, in the order of reading: files by name, folders among them.
FILES = ["a.jsonl", "b/a.txt"]
if find_spec("pyarrow"):
    FILES += ["c.parquet", "d/e/a.parquet"]
IN_A_FILE = 45
# Which document of a file that is no plain text has no letter.
EMPTY = 31
DOCUMENTS = IN_A_FILE * len(FILES)
# Of parquet; the last one of a file is smaller.
ROW_GROUP = 20


def texts() -> list[str]:
    """Documents of 14 to 141 characters, no two of them alike; together they have all SIGNS.

    Any share has one that is held out in its first quarter, which a second epoch comes to.

    Where the file can hold them, some have blanks and line ends of each kind around them, or a
    NUL, and one of each file is empty, which is a document all the same.
    """
    words = [
        f"{n}:> {signs_of(n)}{'äß' * (n % 3)}{'abcdefghij' * (n % 6)}".strip()
        for n in range(DOCUMENTS)
    ]
    odd = {0: "{} \n", 1: "\t {}\r\n", 2: "{}\0{}", 3: "\r{}", EMPTY: ""}
    return [
        f"{word}\n" if in_plain_text(n) else odd.get(n % IN_A_FILE, odd[n % 4]).format(word, word)
        for n, word in enumerate(words)
    ]


def signs_of(document: int) -> str:
    """Ten that follow each other."""
    start = 7 * document % len(SIGNS)
    return (SIGNS * 2)[start : start + 10]


def in_plain_text(document: int) -> bool:
    """Plain text has lines, which keep their ends; an empty one ends a document."""
    return FILES[document // IN_A_FILE].endswith(".txt")


def write(path: Path, documents: Sequence[str], *, row_group: int = ROW_GROUP) -> None:
    """A file of these documents in the form that its name tells. Its last line has no end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        records = ({"text": f"no {n}", FIELD: text} for n, text in enumerate(documents))
        # No line of a JSON text is empty: this one is no document.
        path.write_text("\n".join(["", *map(json.dumps, records)]), "utf-8")
    elif path.suffix == ".txt":
        path.write_text("\n".join(documents), "utf-8")
    else:
        write_parquet(path, documents, row_group)


def write_all(folder: Path) -> None:
    """A file of each form, in folders one in another; the last by name is the oldest."""
    every = texts()
    for n, name in reversed([*enumerate(FILES)]):
        write(folder / name, every[n * IN_A_FILE : (n + 1) * IN_A_FILE])


def write_parquet(path: Path, documents: Sequence[str], row_group: int) -> None:
    """The second of two columns; a row without a text stands in the middle."""
    import pyarrow
    from pyarrow import parquet

    middle = len(documents) // 2
    rows = [*documents[:middle], None, *documents[middle:]]
    table = pyarrow.table({"text": [f"no {n}" for n in range(len(rows))], FIELD: rows})
    parquet.write_table(table, path, row_group_size=row_group)
    groups = parquet.ParquetFile(path).metadata
    sizes = [groups.row_group(n).num_rows for n in range(groups.num_row_groups)]
    assert len(sizes) > 2 and sizes[-1] < sizes[0], f"{path} has row groups of {sizes} rows"


def is_held_out(text: str) -> bool:
    """One in ten, by the text's 64-bit BLAKE2b digest as a little-endian number."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return number % 10 == 0


def documents_of(rank: int, ranks: int, *, held_out: bool) -> list[bytes]:
    """What the rank has to read: document n is of rank n modulo the ranks."""
    mine = (text for text in texts()[rank::ranks] if is_held_out(text) == held_out)
    # A NUL of a text would end its document.
    return [text.replace("\0", "").encode() for text in mine]


def batches_of(
    documents: list[bytes], count: int, seq_len: int = SEQ_LEN
) -> Iterator[list[list[int]]]:
    """So many batches of the endless stream of these documents; rows overlap by one token."""
    need = count * ROWS * seq_len + 1
    stream = bytearray(b"\0")
    for document in cycle(documents):
        if len(stream) >= need:
            break
        stream += document + b"\0"
    starts = range(0, count * ROWS * seq_len, seq_len)
    rows = (list(stream[start : start + seq_len + 1]) for start in starts)
    return iter([list(islice(rows, ROWS)) for _ in range(count)])


def epoch_batches(documents: list[bytes], seq_len: int = SEQ_LEN) -> int:
    """Batches that go once through the documents, and a quarter of the way again."""
    tokens = sum(len(document) + 1 for document in documents)
    return 5 * tokens // (4 * ROWS * seq_len)


class Stream:
    """What the client of a stream gives: records, and the place of the last one."""

    def __init__(self, documents: Sequence[str]) -> None:
        self.documents, self.read = list(documents), 0

    def shared(self, rank: int, world_size: int) -> Stream:
        """One of so many documents."""
        return Stream(self.documents[rank::world_size])

    def shuffle(self, seed: int | None = None, buffer_size: int = 1000) -> Stream:
        """As the client's: nobody asked for it."""
        del buffer_size
        order = random.Random(seed)
        return Stream(order.sample(self.documents, len(self.documents)))

    def __iter__(self) -> Iterator[dict[str, str | None]]:
        every: list[str | None] = [*self.documents]
        # A row without a text is no document.
        for text in [*every[:9], None, *every[9:]][self.read :]:
            self.read += 1
            yield {"text": text}

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


HELD_OUT_BATCHES, RANKS, LONG = 3, (1, 2, 3), 4096
SHARES = [(rank, ranks) for ranks in RANKS for rank in range(ranks)]
# Places of rank 1 of two are a multiple of the ranks, those of rank 0 are not.
READERS = [("local", 0, 2), ("local", 1, 2), ("fineweb_edu", 2, 3)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each form, in folders one in another."""
    folder = tmp_path_factory.mktemp("documents")
    write_all(folder)
    return folder


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The client's stream is one of these, which the client shares out; and what it was asked."""
    client, distributed = ModuleType("datasets"), ModuleType("datasets.distributed")
    asked: list[tuple[Any, ...]] = []

    def load(path: str, *, name: str, split: str, streaming: bool, **_: Any) -> Stream:
        asked.append((path, name, split, streaming))
        return Stream(texts())

    vars(client)["load_dataset"] = load
    vars(distributed)["split_dataset_by_node"] = Stream.shared
    for module in (client, distributed):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return asked


@contextmanager
def opened(
    corpus: Path, rank: int, ranks: int, seq_len: int = SEQ_LEN, dataset: str = "local"
) -> Iterator[Source]:
    """A rank's reader of these documents, closed at the end."""
    source = open_source(
        DataSection(dataset=dataset, local_path=str(corpus), text_field=FIELD, tokenizer="byte"),
        Share(seq_len=seq_len, batch_size=ROWS, rank=rank, world_size=ranks),
    )
    try:
        yield source
    finally:
        source.close()


def trained_on(corpus: Path, *settings: str) -> list[str]:
    """The words of a launch that trains on these documents."""
    where = (f"data.local_path={corpus}", f"data.text_field={FIELD}", *settings)
    return ["--dataset", "local", *as_typed(where)]
