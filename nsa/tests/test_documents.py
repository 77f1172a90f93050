"""Documents reach training whole, in order, once, by one rank, and none that is held out.

The other side is made here from the definition (docs/trainer-contract.md, "Data"), of files that
are written here: tokens are bytes, 0 stands between two documents. Parquet is among them where
this machine has the package; where it has not, the trainer refuses such files by name.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from nsa.data.open import open_source
from nsa.data.packing import open_tokenizer
from nsa.data.source import DEPTH, Batch, DataError, Source
from nsa.data.text import FinewebCorpus
from nsa.settings import DataSection, Share
from nsa.step.engine import Engine, StepOutcome
from nsa.tests.launched import MICRO_BATCHES, MIDDLE, SAVED, STEPS, launch

SEQ_LEN, ROWS = 16, 2
# What a text may hold that is easily taken for something else: both cases of every letter, signs,
# blanks of several kinds, letters that have more than one form, signs beyond 16 bits.
SIGNS = (
    "".join(map(chr, range(33, 127))) + "\u00a0ÄäÉe\u0301ßﬁ…“”‘ıİΩµ１²\u200b\ufeff\u2028😀\t\v  "
)
HELD_OUT_BATCHES, RANKS = 3, (1, 2, 3)
# The reader looks every half second whether it is to end.
SLOW_STEP_S = 0.8
# Not what the config says by itself: another text stands there.
FIELD = "body"
# Where documents lie, in the order of reading: files by name, folders among them.
FILES = ["a.jsonl", "b/a.txt"]
if find_spec("pyarrow"):
    FILES += ["c.parquet", "d/e/a.parquet"]
# Of GPT-2's encoding, where this machine has the package.
TOKENIZERS = ["byte", *(["gpt2"] if find_spec("tiktoken") else [])]
IN_A_FILE = 45
DOCUMENTS = IN_A_FILE * len(FILES)
# Of parquet; the last one of a file is smaller.
ROW_GROUP = 20
# A file of more rows than pyarrow reads at once, and row groups that do not divide that either.
MANY, MANY_ROW_GROUP, LONG = 70_001, 30_000, 4096


def texts() -> list[str]:
    """Documents of 14 to 74 characters, no two alike; together they have all SIGNS.

    Where the file can hold them, some have blanks and line ends around them, or a NUL.
    """
    words = [
        f"{n}: {signs_of(n)}{'äß' * (n % 3)}{'abcdefghij' * (n % 6)}".strip()
        for n in range(DOCUMENTS)
    ]
    odd = {0: "{} \n", 1: "\t {}", 2: "{}\0{}", 3: "{}"}
    return [
        f"{word}\n" if in_plain_text(n) else odd[n % 4].format(word, word)
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
    """A file of these documents in the form that its name tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        records = ({"text": f"no {n}", FIELD: text} for n, text in enumerate(documents))
        lines = (json.dumps(record) + "\n" for record in records)
        path.write_text("".join(lines), "utf-8")
    elif path.suffix == ".txt":
        path.write_text("\n".join(documents), "utf-8")
    else:
        write_parquet(path, documents, row_group)


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


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each form, in folders one in another."""
    folder, every = tmp_path_factory.mktemp("documents"), texts()
    for n, name in enumerate(FILES):
        write(folder / name, every[n * IN_A_FILE : (n + 1) * IN_A_FILE])
    return folder


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


def opened(
    corpus: Path, rank: int, ranks: int, seq_len: int = SEQ_LEN, dataset: str = "local"
) -> Source:
    return open_source(
        DataSection(dataset=dataset, local_path=str(corpus), text_field=FIELD, tokenizer="byte"),
        Share(seq_len=seq_len, batch_size=ROWS, rank=rank, world_size=ranks),
    )


class Stream:
    """What the client of a stream gives: records, and the place of the last one."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[dict[str, str | None]]:
        every: list[str | None] = [*texts()]
        # A row without a text is no document.
        for text in [*every[:9], None, *every[9:]][self.read :]:
            self.read += 1
            yield {"text": text}

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream is one of these."""
    monkeypatch.setattr(FinewebCorpus, "_open", lambda _: Stream())


SHARES = [(rank, ranks) for ranks in RANKS for rank in range(ranks)]
READERS = [("local", 1, 2), ("fineweb_edu", 0, 1)]


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


@pytest.mark.parametrize("suffix", sorted({Path(name).suffix for name in FILES}))
def test_a_file_of_many_documents_is_read_to_its_end(tmp_path: Path, suffix: str) -> None:
    every = [f"{n}\n" if suffix == ".txt" else str(n) for n in range(MANY)]
    write(tmp_path / f"many{suffix}", every, row_group=MANY_ROW_GROUP)
    documents = [text.encode() for text in every[1::2] if not is_held_out(text)]
    count = epoch_batches(documents, LONG)
    source = opened(tmp_path, 1, 2, LONG)
    try:
        for number, wanted in enumerate(batches_of(documents, count, LONG)):
            assert source.fetch().tokens.tolist() == wanted, f"batch {number}"
    finally:
        source.close()


def test_a_long_document_is_read_whole(tmp_path: Path) -> None:
    """Of a third of a million bytes, more than any buffer or bound that a reader may have."""
    lines = (f"{n} {signs_of(n)} " for n in range(12_000))
    text = "".join(lines).replace("\0", "")
    numbered = (f"{n}: {text}" for n in range(100))
    document = next(one for one in numbered if not is_held_out(one))
    write(tmp_path / "long.jsonl", [document])
    wanted = [document.encode()]
    source = opened(tmp_path, 0, 1, LONG)
    try:
        for number, rows in enumerate(batches_of(wanted, epoch_batches(wanted, LONG), LONG)):
            assert source.fetch().tokens.tolist() == rows, f"batch {number}"
    finally:
        source.close()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_separator_that_is_written_out_is_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whoever writes about it ends a document. By a table of bytes, which needs no network."""
    if name == "gpt2":
        import tiktoken

        table = tiktoken.Encoding(
            "bytes",
            pat_str=r"[^\r\n]+|[\r\n]+",
            mergeable_ranks={bytes([number]): number for number in range(256)},
            special_tokens={"<|endoftext|>": 50_256},
        )
        monkeypatch.setattr(tiktoken, "get_encoding", lambda _: table)
    tokenizer = open_tokenizer(name)
    text = f"a<|endoftext|>b {SIGNS}"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.separator == {"byte": 0, "gpt2": 50_256}[name]


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


@pytest.mark.parametrize(("dataset", "rank", "ranks"), READERS)
def test_training_reads_on_beside_an_evaluation(
    streamed: None, corpus: Path, dataset: str, rank: int, ranks: int
) -> None:
    """What is read ahead hides for some batches that an evaluation has moved the reader."""
    documents = documents_of(rank, ranks, held_out=False)
    source = opened(corpus, rank, ranks, dataset=dataset)
    try:
        for number, wanted in enumerate(batches_of(documents, epoch_batches(documents))):
            if number == 2:
                list(source.validation(HELD_OUT_BATCHES))
            assert source.fetch().tokens.tolist() == wanted, f"batch {number}"
    finally:
        source.close()


def test_what_is_read_ahead_waits_for_a_slow_step(corpus: Path) -> None:
    """A step of a large model takes longer than any time after which a reader may give up."""
    documents = documents_of(0, 1, held_out=False)
    source = opened(corpus, 0, 1)
    try:
        for number, wanted in enumerate(batches_of(documents, 3 * DEPTH)):
            assert source.fetch().tokens.tolist() == wanted, f"batch {number}"
            if number == 0:
                sleep(SLOW_STEP_S)
    finally:
        source.close()


def test_evaluation_is_the_same_wherever_training_is(corpus: Path) -> None:
    """Behind half of the documents, and where another run goes on from there."""
    half = epoch_batches(documents_of(1, 2, held_out=False)) // 2
    wanted = list(batches_of(documents_of(1, 2, held_out=True), HELD_OUT_BATCHES))
    first, second = opened(corpus, 1, 2), opened(corpus, 1, 2)
    try:
        for _ in range(half):
            position = first.fetch().position
        second.seek(json.loads(json.dumps(position)))
        for source in (first, second):
            read = [tokens.tolist() for tokens in source.validation(HELD_OUT_BATCHES)]
            assert read == wanted
    finally:
        first.close()
        second.close()


def test_a_stream_is_read_as_it_comes(streamed: None, tmp_path: Path) -> None:
    documents = documents_of(0, 1, held_out=False)
    source = opened(tmp_path, 0, 1, dataset="fineweb_edu")
    try:
        for number, wanted in enumerate(batches_of(documents, epoch_batches(documents))):
            assert source.fetch().tokens.tolist() == wanted, f"batch {number}"
    finally:
        source.close()


@pytest.mark.parametrize(("dataset", "rank", "ranks"), READERS)
def test_reading_goes_on_where_a_checkpoint_was_written(
    streamed: None, corpus: Path, dataset: str, rank: int, ranks: int
) -> None:
    """Again and again: what goes on is stopped in turn. Over the end of an epoch, too."""
    documents = documents_of(rank, ranks, held_out=False)
    count = epoch_batches(documents)
    wanted = list(batches_of(documents, count))
    place, begun = "", 0
    for stop in (1, count // 3, count // 3 + 1, count // 2, count - 2, count):
        source = opened(corpus, rank, ranks, dataset=dataset)
        try:
            if place:
                source.seek(json.loads(place))
            for number in range(begun, stop):
                batch = source.fetch()
                told = f"batch {number} of a run that went on at {begun}"
                assert batch.tokens.tolist() == wanted[number], told
            place = json.dumps(batch.position)
        finally:
            source.close()
        told = f"the place after batch {stop - 1} moved on with what is read ahead"
        assert json.dumps(batch.position) == place, told
        begun = stop


def test_steps_train_on_what_is_read_once_and_in_order(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the files to the gradient of every micro-batch, and after going on from a checkpoint."""
    trained: list[list[list[int]]] = []
    compute = Engine.compute

    def watched(engine: Engine, batches: list[Batch], *words: Any) -> StepOutcome:
        trained.extend(batch.tokens.tolist() for batch in batches)
        return compute(engine, batches, *words)

    monkeypatch.setattr(Engine, "compute", watched)
    of = [f"data.local_path={corpus}", f"data.text_field={FIELD}", f"train.batch_size={ROWS}"]
    words = ["--dataset", "local", *(word for one in of for word in ("--set", one))]
    wanted = list(batches_of(documents_of(0, 1, held_out=False), STEPS * MICRO_BATCHES))
    whole, _ = launch(tmp_path / "whole", *words)
    check_trained(trained, wanted, begun=0)
    trained.clear()
    launch(tmp_path / "on", *words, "--resume", str(whole / MIDDLE))
    check_trained(trained, wanted, begun=SAVED)


def check_trained(
    trained: list[list[list[int]]], wanted: list[list[list[int]]], *, begun: int
) -> None:
    """Batches, from 0, of the steps after `begun`; one that comes again is named."""
    for number, found in enumerate(trained, begun * MICRO_BATCHES):
        step, micro = number // MICRO_BATCHES + 1, number % MICRO_BATCHES + 1
        told = f"step {step}, micro-batch {micro} of a run that went on after step {begun}"
        if found != wanted[number] and found in wanted:
            told += f" has the tokens of batch {wanted.index(found)}, not of {number}"
        assert found == wanted[number], told
    assert len(trained) == len(wanted) - begun * MICRO_BATCHES, "steps left micro-batches out"


def test_reading_does_not_go_on_in_other_files(corpus: Path, tmp_path: Path) -> None:
    """A place among documents means nothing once one of them is another."""
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    first = opened(folder, 0, 1)
    try:
        position = first.fetch().position
    finally:
        first.close()
    other = folder / "b" / "a.txt"
    other.write_bytes(other.read_bytes().replace(b"abcdefghij", b"abcdefghik", 1))
    second = opened(folder, 0, 1)
    try:
        with pytest.raises(DataError, match=r"a\.txt"):
            second.seek(position)
    finally:
        second.close()


def test_a_line_that_is_damaged_is_no_blank_one(tmp_path: Path) -> None:
    """What a training lacks is told, with its place, and not left out."""
    lines = [json.dumps({FIELD: f"document {number}. " * 20}) for number in range(8)]
    lines[5] = lines[5][:-7]
    file = tmp_path / "torn.jsonl"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"torn\.jsonl:6"):
        source = opened(file, 0, 1)
        for _ in range(100):
            source.fetch()
