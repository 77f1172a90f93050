"""Every kind of fault, injected for real once: noticed, named, with evidence, nothing left or lost.

Other tests run beside these, so the seconds are checked loosely; the figures that are
promised are measured one at a time (benchmarks/results/drill.md).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.tools.drill import FAULTS
from runbook.tools.drill.runner import run_drill
from tests.tiers import by_tier

# A death, a hang, a collective that differs, a slow rank. How the others end is told of the fake
# trainer in tests/launch (test_faults.py; test_monitor.py of what grows), and of the trainer's own
# words in tests/train (test_ends.py, test_loop.py, test_checkpoint.py).
ARCHETYPES = ("exit", "sleep_backward", "desync_op", "straggler_100ms")

_CROWDED_S = 12.0
# 20 ms may drown in what the other tests do to one launch, not in what they do to each of three.
_LAUNCHES = {"straggler_20ms": 3}


@pytest.mark.e2e
@pytest.mark.parametrize("name", by_tier(FAULTS, fast=ARCHETYPES.__contains__))
def test_is_noticed(tmp_path: Path, name: str) -> None:
    for number in range(_LAUNCHES.get(name, 1)):
        folder = tmp_path / str(number)
        report = run_drill([FAULTS[name]], folder)
        (row,) = report.rows
        problems = [text for text in row.problems if not text.startswith("took ")]
        if not problems:
            break
    assert problems == [], row
    if row.seconds is not None and row.limit_s is not None:
        assert row.seconds < row.limit_s + _CROWDED_S
    # A good drill leaves no folder; one that was only late keeps its own.
    assert [path.name for path in folder.iterdir()] == ([] if row.ok else [f"001-{name}"])
    assert report.ok == row.ok
    assert report.ok or name != "exit", "the quickest of all is good in every respect"
    assert report.summary()["orphans"] == 0


def test_there_are_at_least_24_kinds() -> None:
    assert len(FAULTS) >= 24
    assert len({fault.title for fault in FAULTS.values()}) == len(FAULTS)
    assert set(ARCHETYPES) <= FAULTS.keys()
