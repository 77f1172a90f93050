"""What reads the documents of `nsa.tests.corpus`; a module of tests takes its fixtures by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nsa.data.packing import open_source
from nsa.data.source import Source
from nsa.settings import DataSection, Share
from nsa.tests.built import as_typed
from nsa.tests.corpus import FIELD, ROWS, SEQ_LEN, Stream, texts, write_all

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
