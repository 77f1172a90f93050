"""Documents reach training whole, in order, once, by one rank, and none that is held out.

The other side is `nsa.tests.corpus`, made from the definition. Where this machine cannot read
parquet, none is among the files: the trainer refuses such files by name.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from time import sleep
from types import ModuleType
from typing import Any

import pytest

from nsa.data.packing import PackedSource, is_validation, open_source, open_tokenizer
from nsa.data.source import DEPTH, Batch, DataError, DataStallError, PrefetchSource, Source
from nsa.data.text import digests
from nsa.launch.ranks import Ranks
from nsa.settings import DataSection, Share
from nsa.step.engine import Engine, StepOutcome
from nsa.tests.corpus import (
    DOCUMENTS,
    FIELD,
    FILES,
    ROWS,
    SEQ_LEN,
    SIGNS,
    Stream,
    batches_of,
    documents_of,
    epoch_batches,
    is_held_out,
    signs_of,
    texts,
    write,
    write_all,
)
from nsa.tests.launched import MICRO_BATCHES, MIDDLE, SAVED, STEPS, launch
from nsa.train.session import _Session

HELD_OUT_BATCHES, RANKS, CONFIG = 3, (1, 2, 3), 2
# The reader looks every half second whether it is to end.
SLOW_STEP_S = 0.8
# Of GPT-2's encoding, where this machine has the package.
TOKENIZERS = ["byte", *(["gpt2"] if find_spec("tiktoken") else [])]
# A file of more rows than pyarrow reads at once, and row groups that do not divide that either.
MANY, MANY_ROW_GROUP, LONG = 70_001, 30_000, 4096


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each form, in folders one in another."""
    folder = tmp_path_factory.mktemp("documents")
    write_all(folder)
    return folder


def opened(
    corpus: Path, rank: int, ranks: int, seq_len: int = SEQ_LEN, dataset: str = "local"
) -> Source:
    return open_source(
        DataSection(dataset=dataset, local_path=str(corpus), text_field=FIELD, tokenizer="byte"),
        Share(seq_len=seq_len, batch_size=ROWS, rank=rank, world_size=ranks),
    )


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


def test_the_stream_is_the_whole_sample_and_is_not_stored(
    streamed: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    """Another subset or split has other documents, and nothing that is trained tells."""
    opened(tmp_path, 0, 2, dataset="fineweb_edu").close()
    assert streamed == [("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", True)]


def test_the_reader_is_given_what_its_config_says(tmp_path: Path) -> None:
    """How long it may wait, and GPT-2's table: without that one the network has to be there."""
    config = {"dataset": "local", "local_path": str(tmp_path), "loader_timeout_s": 7.5}
    write(tmp_path / "a.txt", ["text"])
    share = Share(seq_len=SEQ_LEN, batch_size=ROWS)
    source = open_source(DataSection(tokenizer="byte", **config), share)
    source.close()
    assert isinstance(source, PrefetchSource) and source.timeout_s == 7.5
    if "gpt2" in TOKENIZERS:
        with pytest.raises(DataError, match="no-table"):
            open_source(DataSection(tokenizer="gpt2", tokenizer_file="no-table", **config), share)


def test_what_is_held_out_is_known_by_its_text_alone() -> None:
    """Or another process trains on it."""
    found = [text for text in texts() if is_validation(text)]
    assert found == [text for text in texts() if is_held_out(text)]


SHARES = [(rank, ranks) for ranks in RANKS for rank in range(ranks)]
# Places of rank 1 of two are a multiple of the ranks, those of rank 0 are not.
READERS = [("local", 0, 2), ("local", 1, 2), ("fineweb_edu", 2, 3)]


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


@pytest.mark.parametrize("held_out", [False, True])
def test_a_long_document_is_read_whole(tmp_path: Path, held_out: bool) -> None:
    """Of a third of a million bytes, more than any buffer or bound that a reader may have."""
    lines = (f"{n} {signs_of(n)} " for n in range(12_000))
    text = "".join(lines).replace("\0", "")
    numbered = (f"{n}: {text}" for n in range(100))
    document = next(one for one in numbered if is_held_out(one) == held_out)
    write(tmp_path / "long.jsonl", [document])
    wanted = [document.encode()]
    count = epoch_batches(wanted, LONG)
    source = opened(tmp_path, 0, 1, LONG)
    read = source.validation(count) if held_out else (source.fetch().tokens for _ in range(count))
    try:
        for number, rows in enumerate(batches_of(wanted, count, LONG)):
            assert next(read).tolist() == rows, f"batch {number}"
    finally:
        source.close()


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
    monkeypatch.setattr("nsa.data.packing.GPT2_TABLE_SHA256", digest)
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
    streamed: Any, corpus: Path, dataset: str, rank: int, ranks: int
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


def test_what_is_read_ahead_waits_for_a_slow_step(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a large model takes longer than any time after which a reader may give up.

    Meanwhile it does not read on and on into memory.
    """
    documents = documents_of(0, 1, held_out=False)
    source, made = opened(corpus, 0, 1), []
    try:
        for number, wanted in enumerate(batches_of(documents, 3 * DEPTH)):
            assert source.fetch().tokens.tolist() == wanted, f"batch {number}"
            if number == 0:
                monkeypatch.setattr(PackedSource, "fetch", counted(made, PackedSource.fetch))
                sleep(SLOW_STEP_S)
                assert len(made) <= DEPTH + 1, f"{len(made)} batches are read ahead"
    finally:
        source.close()


def test_what_was_trained_on_is_let_go(tmp_path: Path) -> None:
    """Or the host's memory grows with every document, and in every epoch again."""
    size = 100_000
    document = next(text for n in range(100) if not is_held_out(text := f"{n:04}" * (size // 4)))
    write(tmp_path / "long.jsonl", [document])
    source = opened(tmp_path, 0, 1, LONG)
    assert isinstance(source, PrefetchSource)
    epoch = len(document) // (ROWS * LONG) + 1
    # Of a short document one batch would take thousands of epochs.
    assert next(source.inner.corpus.documents()).text == document
    for _ in range(epoch):
        source.inner.fetch()
    tracemalloc.start()
    try:
        for _ in range(40 * epoch):
            source.inner.fetch()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        source.close()
    # A byte of text is read as a number of 8 bytes, and what is left of a document stays.
    assert held < 2 * 8 * size, f"forty epochs of {size} bytes leave {held}"


def test_a_batch_that_had_to_be_waited_for_is_counted(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or nobody learns that the data are what is slow; one that takes too long ends the run."""
    fetch = PackedSource.fetch

    def slow(source: PackedSource) -> Batch:
        sleep(0.05)
        return fetch(source)

    monkeypatch.setattr(PackedSource, "fetch", slow)
    source = opened(corpus, 0, 1)
    assert isinstance(source, PrefetchSource)
    try:
        for _ in range(4):
            source.fetch()
        told = source.statistics()
        source.timeout_s = 0.001
        with pytest.raises(DataStallError):
            for _ in range(DEPTH + 2):
                source.fetch()
    finally:
        source.close()
    assert told is not None and told["waits"] >= 2 and told["wait_s"] > 0.05, told


def counted(made: list[Batch], fetch: Callable[..., Batch]) -> Callable[..., Batch]:
    """The same, and every batch is noted."""

    def noting(*words: Any) -> Batch:
        made.append(fetch(*words))
        return made[-1]

    return noting


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


@pytest.mark.parametrize(("rank", "ranks"), SHARES)
def test_a_stream_is_read_as_it_comes(streamed: Any, tmp_path: Path, rank: int, ranks: int) -> None:
    """Whoever moves its documents before they are shared out has ranks read the same ones."""
    documents = documents_of(rank, ranks, held_out=False)
    source = opened(tmp_path, rank, ranks, dataset="fineweb_edu")
    try:
        for number, wanted in enumerate(batches_of(documents, epoch_batches(documents))):
            assert source.fetch().tokens.tolist() == wanted, f"batch {number}"
    finally:
        source.close()


def test_a_stream_that_breaks_off_is_not_at_its_end(
    streamed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or training begins again with the first documents whenever the network fails."""

    def broken(self: Stream) -> Iterator[dict[str, str | None]]:
        yield from ({"text": text} for text in self.documents[:20])
        raise ConnectionError("the other side is gone")

    monkeypatch.setattr(Stream, "__iter__", broken)
    source = opened(tmp_path, 0, 1, dataset="fineweb_edu")
    try:
        with pytest.raises(DataError, match="the other side is gone"):
            for _ in range(epoch_batches(documents_of(0, 1, held_out=False))):
                source.fetch()
    finally:
        source.close()


def test_nothing_is_trained_on_in_place_of_documents_that_are_missing(tmp_path: Path) -> None:
    """Unless the config asks for generated tokens then."""
    words = ("--dataset", "local", "--set", f"data.local_path={tmp_path / 'nowhere'}")
    _, ended = launch(tmp_path / "run", *words, code=CONFIG)
    assert "nowhere: no such file or folder" in ended["reason"], ended


def test_all_ranks_train_on_generated_tokens_where_one_cannot_read(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for; else some would train on documents, and others on noise."""
    opening = _Session._source

    class Elsewhere(Ranks):
        def any(self, flag: bool) -> bool:
            """Another rank's is up."""
            return True

    def parted(session: _Session, ranks: Ranks) -> tuple[Source, Batch | None]:
        return opening(session, Elsewhere(place=ranks.place, device=ranks.device, grouped=False))

    monkeypatch.setattr(_Session, "_source", parted)
    of = [f"data.local_path={corpus}", f"data.text_field={FIELD}", "data.synthetic_on_fail=true"]
    words = ["--dataset", "local", *(word for one in of for word in ("--set", one))]
    folder, _ = launch(tmp_path / "run", *words)
    told = json.loads((folder / "env.json").read_text())
    assert told["effective"]["dataset"] == "synthetic"
    assert any("rank" in note for note in told["notes"]), f"nobody is told why: {told['notes']}"


@pytest.mark.parametrize(("dataset", "rank", "ranks"), READERS)
def test_reading_goes_on_where_a_checkpoint_was_written(
    streamed: Any, corpus: Path, dataset: str, rank: int, ranks: int
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
            # How far it is, in words, counts from the beginning of the data too.
            if stop == count:
                assert source.where().startswith("epoch 1,"), source.where()
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
        outcome = compute(engine, batches, *words)
        # Only now: until then nothing else may be written where the tokens are.
        trained.extend(batch.tokens.tolist() for batch in batches)
        return outcome

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


# Of a file that is long, the last word.
@pytest.mark.parametrize(
    ("name", "old"), [("b/a.txt", b"abcdefghij"), ("b/long.txt", b"end"), ("b/aa.txt", b"")]
)
def test_reading_does_not_go_on_in_other_files(
    corpus: Path, tmp_path: Path, name: str, old: bytes
) -> None:
    """A place among documents means nothing once one of them is another, or a file is new."""
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    (folder / "b/long.txt").write_bytes(b"word\n" * 600_000 + b"end")
    first = opened(folder, 0, 1)
    try:
        position = first.fetch().position
    finally:
        first.close()
    other = folder / name
    content = other.read_bytes() if old else b""
    other.write_bytes(content.replace(old, b"abcdefghik"[-len(old) :], 1))
    second = opened(folder, 0, 1)
    try:
        with pytest.raises(DataError, match=re.escape(other.name)):
            second.seek(position)
    finally:
        second.close()


def test_of_files_that_are_too_large_to_read_each_part_is_looked_at(tmp_path: Path) -> None:
    """A quarter of it, from the first byte to the last."""
    file, size = tmp_path / "a.txt", 1 << 20

    def known(*places: int) -> dict[str, str]:
        content = bytearray(size)
        for place in places:
            content[place] = 1
        file.write_bytes(content)
        return digests(tmp_path, [file], most_bytes=size // 4)

    unread = known()
    looked = [place for place in (*range(0, size, 1 << 15), size - 1) if known(place) != unread]
    assert (looked[0], looked[-1]) == (0, size - 1)
    assert max(b - a for a, b in pairwise(looked)) < size // 3


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
