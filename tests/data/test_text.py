"""Documents that cannot be read are named; generated tokens, and reading ahead."""

from __future__ import annotations

import json
import math
import os
import shutil
import string
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.data import (
    CHAIN_CHANCES,
    DEPTH,
    Batch,
    DataStallError,
    GeneratedSource,
    PackedSource,
    PrefetchSource,
    chain_entropy_nats,
    is_validation,
)
from nsa.data.text import (
    ByteTokenizer,
    DataError,
    FinewebCorpus,
    LocalCorpus,
    Place,
    changes,
    digests,
    open_tokenizer,
)
from nsa.settings import Share
from tests.data.hub import serve, write_shards
from tests.shared import crowded
from tests.train.launching import ROOT

# Letters of which a document of five is kept for validation, and the others.
HELD = [c for c in string.ascii_letters if is_validation(c * 5)]
TRAINED = [c for c in string.ascii_letters if c not in HELD]


def in_folder(folder: Path, letters: Sequence[str], **share: int) -> PackedSource:
    """Documents of which each is one letter, five times."""
    path = folder / "letters.jsonl"
    path.write_text("".join(json.dumps({"text": 5 * letter}) + "\n" for letter in letters))
    corpus = LocalCorpus(str(path), **share)
    return PackedSource(corpus, ByteTokenizer(), Share(seq_len=8, batch_size=2))


def test_too_few_documents_are_an_error_not_a_hang(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no training document for this rank"):
        in_folder(tmp_path, TRAINED[:1], rank=1, world_size=2).fetch()
    with pytest.raises(DataError, match="no training document for this rank"):
        in_folder(tmp_path, HELD).fetch()
    with pytest.raises(DataError, match="no validation document"):
        list(in_folder(tmp_path, TRAINED).validation(1))


def texts(corpus: LocalCorpus, place: Place | None = None) -> list[str]:
    return [document.text for document in corpus.documents(place)]


def test_a_copy_is_the_same_and_what_is_gone_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(name)
    copied = Path(shutil.copytree(folder, tmp_path / "elsewhere", copy_function=shutil.copyfile))
    then = LocalCorpus(str(folder)).contents()
    assert LocalCorpus(str(copied)).contents() == then
    (copied / "a.txt").unlink()
    assert changes(then, LocalCorpus(str(copied)).contents()) == ["a.txt is gone"]


def test_of_large_files_blocks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    content = bytearray(os.urandom(1 << 20))
    path.write_bytes(content)
    small = 256 << 10  # four blocks
    before = digests(tmp_path, [path], most_bytes=small)
    assert before != digests(tmp_path, [path])
    for other in (bytes([content[0] ^ 1]) + content[1:], content[:-1] + b"?", content + b"x"):
        path.write_bytes(other)
        told = changes(before, digests(tmp_path, [path], most_bytes=small))
        assert told == ["a.txt holds something else"]
    path.write_bytes(content)
    assert changes(before, digests(tmp_path, [path], most_bytes=small)) == []


@pytest.mark.parametrize(
    ("line", "why"),
    [(b'{"body": "x"}', "no text under 'text'; set data.text_field"), (b"[1]", "no text under"),
     (b"{broken", "not JSON"), (b'{"text": 3}', "no text under"),
     ('{"text": "caf\u00e9"}'.encode("latin-1"), "not UTF-8")],
)  # fmt: skip
def test_bad_jsonl_names_file_and_line(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"d\.jsonl:2: {why}"):
        texts(LocalCorpus(str(path)))
    path.write_text('{"body": "x"}\n')
    assert texts(LocalCorpus(str(path), text_field="body")) == ["x"]


def test_parquet_is_read_or_its_package_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        path.write_bytes(b"PAR1")
        with pytest.raises(DataError, match=r"pyarrow.*nsa-runbook\[parquet\]"):
            texts(LocalCorpus(str(path)))
        return
    for broken in (b"PAR1", b"", b"PAR1" + b"x" * 40 + b"PAR1"):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"d\.parquet: cannot be read as parquet \("):
            texts(LocalCorpus(str(path)))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), path)
    assert texts(LocalCorpus(str(path)), {"document": 1}) == ["b"]
    with pytest.raises(DataError, match="no column 'body'"):
        texts(LocalCorpus(str(path), text_field="body"))


def test_optional_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(DataError, match=r"tiktoken.*nsa-runbook\[gpt2\]"):
        open_tokenizer("gpt2")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"datasets.*nsa-runbook\[fineweb\]"):
        FinewebCorpus()


GIVEN: Any = ("synthetic", 256, Share(seq_len=8, batch_size=2, seed=1))


def inner() -> GeneratedSource:
    return GeneratedSource(*GIVEN)


class Stalling(GeneratedSource):
    """Gives `good` batches, then none until released."""

    def __init__(self, good: int) -> None:
        super().__init__(*GIVEN)
        self.good, self.release = good, threading.Event()

    def fetch(self) -> Batch:
        if self.step >= self.good:
            self.release.wait(30)
        return super().fetch()


def test_batches_and_positions_come_through_unchanged() -> None:
    ahead, straight = PrefetchSource(inner(), timeout_s=5), inner()
    for _ in range(2 * DEPTH):
        one, other = ahead.fetch(), straight.fetch()
        assert torch.equal(one.tokens, other.tokens)
        # The position is that of the batch, not of how far the thread has read.
        assert one.position == other.position
    ahead.close()


@pytest.mark.parametrize(("good", "words"), [(0, "the first batch"), (2, "batch 3")])
def test_stalls_are_named_with_their_budget(good: int, words: str) -> None:
    source = Stalling(good)
    ahead = PrefetchSource(source, timeout_s=60)
    for _ in range(good):
        ahead.fetch()
    ahead.timeout_s = 0.2
    begin = time.monotonic()
    with pytest.raises(DataStallError, match=words) as caught:
        ahead.fetch()
    assert 0.15 < time.monotonic() - begin < crowded(2)
    assert "--dataset synthetic" in str(caught.value)
    source.release.set()
    ahead.close()


def test_a_closed_source_leaves_no_thread_behind() -> None:
    """One that lives when Python ends may abort the process, whatever the program did."""
    before, ahead = set(threading.enumerate()), PrefetchSource(inner(), timeout_s=5)
    ahead.fetch()
    assert set(threading.enumerate()) - before
    ahead.close()
    assert not set(threading.enumerate()) - before


def test_markov_entropy_is_what_the_sample_shows() -> None:
    """The entropy of a token given the one before, counted over a long sample."""
    one = GeneratedSource("markov", 256, Share(seq_len=2000, batch_size=40, seed=3))
    tokens = one.fetch().tokens
    jumps = Counter(((tokens[:, 1:] - tokens[:, :-1]) % 256).flatten().tolist())
    total = sum(jumps.values())
    observed = -sum(n / total * math.log(n / total) for n in jumps.values())
    expected = -sum(p * math.log(p) for p in CHAIN_CHANCES)
    assert chain_entropy_nats() == expected == one.floor_nats
    assert observed == pytest.approx(expected, abs=0.01)
    assert len(jumps) == len(CHAIN_CHANCES)
    assert inner().floor_nats == pytest.approx(math.log(256))


pytest.importorskip("datasets", reason="the extra fineweb is not installed")
pytest.importorskip("pyarrow")

SHARES = """
import json
from nsa.data.text import FinewebCorpus
from nsa.launch.process import leave

def texts(found):
    return [document.text for document in found]

told = {}
for ranks in (1, 2, 3, 4):
    told[ranks] = [texts(FinewebCorpus(rank=r, world_size=ranks).documents()) for r in range(ranks)]
resumed = []
for ranks, rank in ((1, 0), (2, 1), (4, 2)):
    corpus = FinewebCorpus(rank=rank, world_size=ranks)
    whole = list(corpus.documents())
    for cut in (0, len(whole) // 2, len(whole) - 1):
        place = json.loads(json.dumps(whole[cut].after))
        other = FinewebCorpus(rank=rank, world_size=ranks)
        resumed.append(texts(other.documents(place)) == texts(whole[cut + 1:]))
    # Evaluation reads beside training.
    one, two = corpus.documents(), corpus.documents()
    mixed = [document for _ in range(9) for document in (next(one), next(two))]
    resumed.append(texts(mixed[::2]) == texts(mixed[1::2]) == texts(whole[:9]))
    resumed.append(texts(corpus.documents(mixed[-1].after)) == texts(whole[9:]))
print(json.dumps({"shares": told, "resumed": resumed, "where": corpus.describe(whole[5].after)}))
leave(0)  # as the trainer does: the threads of its reader may abort an interpreter that ends
"""


def _environment(address: str, home: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "NSA_"))}
    return {**kept, "HF_ENDPOINT": address, "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("hub")
    every = write_shards(folder / "files", shards=4, documents=20)
    with serve(folder / "files") as hub:
        done = subprocess.run(
            [sys.executable, "-c", SHARES],
            env=_environment(hub.address, folder / "home"),
            capture_output=True,
            text=True,
            timeout=100,
            cwd=ROOT,
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "every": every, "asked": hub.asked}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_all_documents_and_none_twice(told: dict[str, Any], ranks: int) -> None:
    shares = told["shares"][str(ranks)]
    assert len(shares) == ranks and all(shares)
    together = [text for share in shares for text in share]
    assert sorted(together) == sorted(told["every"])


def test_files_belong_to_one_rank_where_they_can(told: dict[str, Any]) -> None:
    shards = [{text.split()[1] for text in share} for share in told["shares"]["2"]]
    assert shards == [{"0", "2"}, {"1", "3"}] or shards == [{"0", "1"}, {"2", "3"}]


def test_going_on_repeats_and_skips_nothing(told: dict[str, Any]) -> None:
    assert told["resumed"] == [True] * 15
    assert told["where"].startswith("file ")
    assert any(".parquet bytes=" in line for line in told["asked"]), "streamed, in ranges"
