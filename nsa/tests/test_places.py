"""Reading is not too far ahead and goes on where it was; evaluation has a place of its own.

The other side is `nsa.tests.corpus`, made from the definition. A test stands before those that fail
because of it.
"""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from nsa.data import DEPTH, Batch, PackedSource, PrefetchSource
from nsa.data.text import DataError, digests
from nsa.step.engine import Engine, StepOutcome
from nsa.tests import corpus as documents
from nsa.tests.corpus import (
    HELD_OUT_BATCHES,
    LONG,
    READERS,
    ROWS,
    SHARES,
    batches_of,
    documents_of,
    epoch_batches,
    is_held_out,
    opened,
    trained_on,
    write,
)
from nsa.tests.launched import MICRO_BATCHES, MIDDLE, SAVED, STEPS, launch

corpus, streamed = documents.corpus, documents.streamed


# The reader looks every half second whether it is to end.
SLOW_STEP_S = 0.8


@pytest.mark.topic("read_ahead")
def test_what_is_read_ahead_waits_for_a_slow_step(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a large model takes longer than any time after which a reader may give up.

    Meanwhile it does not read on and on into memory.
    """
    documents = documents_of(0, 1, held_out=False)
    made: list[Batch] = []
    with opened(corpus, 0, 1) as source:
        for number, wanted in enumerate(batches_of(documents, 3 * DEPTH)):
            assert source.fetch().tokens.tolist() == wanted, f"batch {number}"
            if number == 0:
                monkeypatch.setattr(PackedSource, "fetch", counted(made, PackedSource.fetch))
                sleep(SLOW_STEP_S)
                assert len(made) <= DEPTH + 1, f"{len(made)} batches are read ahead"


def counted(made: list[Batch], fetch: Callable[..., Batch]) -> Callable[..., Batch]:
    """The same, and every batch is noted."""

    def noting(*words: Any) -> Batch:
        made.append(fetch(*words))
        return made[-1]

    return noting


@pytest.mark.topic("read_ahead")
def test_what_was_trained_on_is_let_go(tmp_path: Path) -> None:
    """Or the host's memory grows with every document, and in every epoch again."""
    size = 100_000
    document = next(text for n in range(100) if not is_held_out(text := f"{n:04}" * (size // 4)))
    write(tmp_path / "long.jsonl", [document])
    epoch = len(document) // (ROWS * LONG) + 1
    with opened(tmp_path, 0, 1, LONG) as source:
        assert isinstance(source, PrefetchSource)
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
    # A byte of text is read as a number of 8 bytes, and what is left of a document stays.
    assert held < 2 * 8 * size, f"forty epochs of {size} bytes leave {held}"


@pytest.mark.topic("places")
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
        with opened(corpus, rank, ranks, dataset=dataset) as source:
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
        told = f"the place after batch {stop - 1} moved on with what is read ahead"
        assert json.dumps(batch.position) == place, told
        begun = stop


# Of a file that is long, the last word.
@pytest.mark.topic("other_files")
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
    with opened(folder, 0, 1) as first:
        position = first.fetch().position
    other = folder / name
    content = other.read_bytes() if old else b""
    other.write_bytes(content.replace(old, b"abcdefghik"[-len(old) :], 1))
    with opened(folder, 0, 1) as second, pytest.raises(DataError, match=re.escape(other.name)):
        second.seek(position)


@pytest.mark.topic("other_files")
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


@pytest.mark.topic("held_out")
@pytest.mark.parametrize(("rank", "ranks"), SHARES)
def test_evaluation_reads_what_is_held_out_and_the_same_each_time(
    corpus: Path, rank: int, ranks: int
) -> None:
    documents = documents_of(rank, ranks, held_out=True)
    assert documents, "no document of this rank is held out: choose others here"
    wanted = list(batches_of(documents, HELD_OUT_BATCHES))
    with opened(corpus, rank, ranks) as source:
        for _ in range(2):
            read = [tokens.tolist() for tokens in source.validation(HELD_OUT_BATCHES)]
            assert read == wanted
            source.fetch()


@pytest.mark.topic("held_out")
def test_evaluation_is_the_same_wherever_training_is(corpus: Path) -> None:
    """Behind half of the documents, and where another run goes on from there."""
    half = epoch_batches(documents_of(1, 2, held_out=False)) // 2
    wanted = list(batches_of(documents_of(1, 2, held_out=True), HELD_OUT_BATCHES))
    with opened(corpus, 1, 2) as first, opened(corpus, 1, 2) as second:
        for _ in range(half):
            position = first.fetch().position
        second.seek(json.loads(json.dumps(position)))
        for source in (first, second):
            read = [tokens.tolist() for tokens in source.validation(HELD_OUT_BATCHES)]
            assert read == wanted


@pytest.mark.topic("held_out")
@pytest.mark.parametrize(("dataset", "rank", "ranks"), READERS)
def test_training_reads_on_beside_an_evaluation(
    streamed: Any, corpus: Path, dataset: str, rank: int, ranks: int
) -> None:
    """What is read ahead hides for some batches that an evaluation has moved the reader."""
    documents = documents_of(rank, ranks, held_out=False)
    with opened(corpus, rank, ranks, dataset=dataset) as source:
        for number, wanted in enumerate(batches_of(documents, epoch_batches(documents))):
            if number == 2:
                list(source.validation(HELD_OUT_BATCHES))
            assert source.fetch().tokens.tolist() == wanted, f"batch {number}"


@pytest.mark.topic("batches")
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
    words = trained_on(corpus, f"train.batch_size={ROWS}")
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
