"""Documents reach training whole, in order, once, by one rank, and none that is held out.

The other side is `nsa.tests.corpus`, made from the definition. Where this machine cannot read
parquet, none is among the files: the trainer refuses such files by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from nsa.data import (
    DEPTH,
    Batch,
    DataStallError,
    PackedSource,
    PrefetchSource,
    Source,
    is_validation,
    open_source,
)
from nsa.data.text import DataError
from nsa.launch.ranks import Ranks
from nsa.settings import DataSection, Share
from nsa.tests import corpus as documents
from nsa.tests.corpus import (
    DOCUMENTS,
    FIELD,
    FILES,
    LONG,
    ROWS,
    SEQ_LEN,
    SHARES,
    Stream,
    batches_of,
    documents_of,
    epoch_batches,
    is_held_out,
    opened,
    signs_of,
    texts,
    trained_on,
    write,
)
from nsa.tests.launched import launch
from nsa.tests.test_tokens import TOKENIZERS
from nsa.train.session import _Session

corpus, streamed = documents.corpus, documents.streamed

# A file of more rows than pyarrow reads at once, and row groups that do not divide that either.
MANY, MANY_ROW_GROUP = 70_001, 30_000
CONFIG = 2


# Parts by themselves come first: what reads through one of them fails with it.
@pytest.mark.topic("reader")
def test_the_stream_is_the_whole_sample_and_is_not_stored(
    streamed: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    """Another subset or split has other documents, and nothing that is trained tells."""
    with opened(tmp_path, 0, 2, dataset="fineweb_edu"):
        pass
    assert streamed == [("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", True)]


@pytest.mark.topic("reader")
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


@pytest.mark.topic("held_out_rule")
def test_what_is_held_out_is_known_by_its_text_alone() -> None:
    """Or another process trains on it."""
    found = [text for text in texts() if is_validation(text)]
    assert found == [text for text in texts() if is_held_out(text)]


@pytest.mark.parametrize(("rank", "ranks"), SHARES)
def test_training_reads_its_documents_in_order_and_again(
    corpus: Path, rank: int, ranks: int
) -> None:
    documents = documents_of(rank, ranks, held_out=False)
    assert len(documents) > 0.7 * DOCUMENTS / ranks
    with opened(corpus, rank, ranks) as source:
        check_read(source, documents)


def check_read(source: Source, documents: list[bytes], seq_len: int = SEQ_LEN) -> None:
    """What is fetched is these documents, once and a quarter of the way again."""
    count = epoch_batches(documents, seq_len)
    for number, wanted in enumerate(batches_of(documents, count, seq_len)):
        assert source.fetch().tokens.tolist() == wanted, f"batch {number}"


@pytest.mark.parametrize("suffix", sorted({Path(name).suffix for name in FILES}))
def test_a_file_of_many_documents_is_read_to_its_end(tmp_path: Path, suffix: str) -> None:
    every = [f"{n}\n" if suffix == ".txt" else str(n) for n in range(MANY)]
    write(tmp_path / f"many{suffix}", every, row_group=MANY_ROW_GROUP)
    documents = [text.encode() for text in every[1::2] if not is_held_out(text)]
    with opened(tmp_path, 1, 2, LONG) as source:
        check_read(source, documents, LONG)


@pytest.mark.parametrize(
    "held_out", [False, pytest.param(True, marks=pytest.mark.topic("held_out"))]
)
def test_a_long_document_is_read_whole(tmp_path: Path, held_out: bool) -> None:
    """Of a third of a million bytes, more than any buffer or bound that a reader may have."""
    lines = (f"{n} {signs_of(n)} " for n in range(12_000))
    text = "".join(lines).replace("\0", "")
    numbered = (f"{n}: {text}" for n in range(100))
    document = next(one for one in numbered if is_held_out(one) == held_out)
    write(tmp_path / "long.jsonl", [document])
    wanted = [document.encode()]
    count = epoch_batches(wanted, LONG)
    with opened(tmp_path, 0, 1, LONG) as source:
        trained = (source.fetch().tokens for _ in range(count))
        read = source.validation(count) if held_out else trained
        for number, rows in enumerate(batches_of(wanted, count, LONG)):
            assert next(read).tolist() == rows, f"batch {number}"


def test_a_batch_that_takes_too_long_ends_the_run(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = PackedSource.fetch

    def slow(source: PackedSource) -> Batch:
        sleep(0.05)
        return fetch(source)

    monkeypatch.setattr(PackedSource, "fetch", slow)
    with opened(corpus, 0, 1) as source:
        assert isinstance(source, PrefetchSource)
        source.fetch()
        source.timeout_s = 0.001
        with pytest.raises(DataStallError):
            for _ in range(DEPTH + 2):
                source.fetch()


@pytest.mark.parametrize(("rank", "ranks"), SHARES)
def test_a_stream_is_read_as_it_comes(streamed: Any, tmp_path: Path, rank: int, ranks: int) -> None:
    """Whoever moves its documents before they are shared out has ranks read the same ones."""
    documents = documents_of(rank, ranks, held_out=False)
    with opened(tmp_path, rank, ranks, dataset="fineweb_edu") as source:
        check_read(source, documents)


@pytest.mark.topic("unread")
def test_a_stream_that_breaks_off_is_not_at_its_end(
    streamed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or training begins again with the first documents whenever the network fails."""

    def broken(self: Stream) -> Iterator[dict[str, str | None]]:
        yield from ({"text": text} for text in self.documents[:20])
        raise ConnectionError("the other side is gone")

    monkeypatch.setattr(Stream, "__iter__", broken)
    count = epoch_batches(documents_of(0, 1, held_out=False))
    with (
        opened(tmp_path, 0, 1, dataset="fineweb_edu") as source,
        pytest.raises(DataError, match="the other side is gone"),
    ):
        for _ in range(count):
            source.fetch()


@pytest.mark.topic("unread")
def test_nothing_is_trained_on_in_place_of_documents_that_are_missing(tmp_path: Path) -> None:
    """Unless the config asks for generated tokens then."""
    words = ("--dataset", "local", "--set", f"data.local_path={tmp_path / 'nowhere'}")
    _, ended = launch(tmp_path / "run", *words, code=CONFIG)
    assert "nowhere: no such file or folder" in ended["reason"], ended


@pytest.mark.topic("unread")
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
    words = trained_on(corpus, "data.synthetic_on_fail=true")
    folder, _ = launch(tmp_path / "run", *words)
    told = json.loads((folder / "env.json").read_text())
    assert told["effective"]["dataset"] == "synthetic"
    assert any("rank" in note for note in told["notes"]), f"nobody is told why: {told['notes']}"


@pytest.mark.topic("unread")
def test_a_line_that_is_damaged_is_no_blank_one(tmp_path: Path) -> None:
    """What a training lacks is told, with its place, and not left out."""
    lines = [json.dumps({FIELD: f"document {number}. " * 20}) for number in range(8)]
    lines[5] = lines[5][:-7]
    file = tmp_path / "torn.jsonl"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"torn\.jsonl:6"), opened(file, 0, 1) as source:
        for _ in range(100):
            source.fetch()
