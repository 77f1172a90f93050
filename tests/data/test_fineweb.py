"""FineWeb-Edu through the real client: from a Hub that is here, by rank, resumed.

Each scene is one process, because the client reads the Hub's address when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data.hub import serve, write_shards
from tests.train.launching import ROOT

pytest.importorskip("datasets", reason="the extra fineweb is not installed")
pytest.importorskip("pyarrow")

SHARES = """
import json
from nsa.data.text import FinewebCorpus

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
