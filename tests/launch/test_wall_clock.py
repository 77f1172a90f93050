"""A rank's wall clock against its machine's: late arrivals and a set clock are no fault of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from runbook.launch.slurm.files import RankOnNode
from runbook.launch.slurm.ranks import RanksOnNodes
from runbook.launch.watch import RankWatch
from runbook.launch.watch.rank_state import WallGap
from tests.factory.files import record, say

TOKEN = "ab12"


def gap_of(gaps: Sequence[float]) -> float | None:
    """Arrivals every tenth of a second of lines that bear so many seconds less."""
    found = WallGap()
    for number, gap in enumerate(gaps):
        found.arrived(1.7e9 + number / 10 - gap, 1.7e9 + number / 10)
    return None if found.seconds is None else round(found.seconds, 3)


@pytest.mark.parametrize(
    ("gaps", "wanted"),
    [
        ([0.1] * 40, 0.1),
        # Nearly every arrival is late on a machine that has other things to do.
        ([30.0, 30.0, 30.0, 0.2] * 10, 0.2),
        # Set by an hour, to and fro: lines that were written before arrive after.
        ([0.1] * 10 + [3600.1] + [0.1] * 10 + [-3599.9] + [0.1] * 10, 0.1),
        ([3600.1] * 40, 3600.1),
        ([-3600.0] * 40, -3600.0),
        # An hour off in the second half.
        ([0.1] * 20 + [3600.1] * 20, 3600.1),
        ([3600.1] * 3, 3600.1),
        ([3600.1] * 2, None),
        ([], None),
    ],
)
def test_the_nearest_of_some_arrivals_counts(gaps: list[float], wanted: float | None) -> None:
    assert gap_of(gaps) == wanted


def watched(watch: RankWatch, folder: Path, gap_s: float) -> dict[str, float]:
    """What is known of a rank whose times of day are so many seconds behind."""
    for step in range(1, 11):
        say(folder, 0, record("step_end", mono=step / 10, step=step, pid=1, ts=time.time() - gap_s))
        watch.update()
    return watch.ranks[0].clocks()


def test_a_rank_is_held_against_the_clock_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "honest").mkdir()
    honest = watched(RankWatch(tmp_path / "honest", TOKEN, 0.0), tmp_path / "honest", 0.0)
    behind = watched(RankWatch(tmp_path, TOKEN, 0.0), tmp_path, 3600.0)
    assert 0 <= honest["wall_gap_s"] < 1800
    assert behind["wall_gap_s"] >= 3600


def test_a_rank_on_another_machine_is_held_against_that_ones_clock(tmp_path: Path) -> None:
    """The machines' clocks are an hour apart, which is no fault of the trainer."""
    watch = RanksOnNodes(tmp_path, TOKEN, 0.0, ranks_per_node=1)
    assert "wall_gap_s" not in watched(watch, tmp_path, 3600.0)
    told = RankOnNode(pid=1, state="S", gone=False, gap_s=0.1)
    state = watch.ranks[0]
    state.told_gap_s = told.gap_s
    assert state.clocks()["wall_gap_s"] == 0.1
