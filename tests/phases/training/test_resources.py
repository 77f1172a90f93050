"""A launch that keeps what it takes besides memory is no GO, and the reason names what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from runbook.records import Outcome, Reason
from runbook.records.evidence import LaunchEvidence
from tests.phases import spoil
from tests.phases.answers import DAMAGED, UNBALANCED, row, says
from tests.phases.heartbeats import SHA

LOOKS = 60
STEP = np.linspace(20, 1200, LOOKS).round()
SHARED = ("shm_mib", "folder_mib", "free_mib")
# What the heartbeats of these launches tell.
RSS_MIB = 30_000.0


def seen(looks: int = LOOKS, **of_rank_1: Any) -> spoil.Change:
    """Two ranks that were looked at while they stepped; all keep their level but rank 1's."""
    tables = []
    for rank in (0, 1):
        level: dict[str, Any] = {
            "mono": np.arange(LOOKS) / 2,
            "step": STEP,
            "rank": rank,
            "rss_mib": RSS_MIB,
            "descriptors": 40 + np.arange(LOOKS) % 3,
            "threads": np.where(np.arange(LOOKS) % 10 == 0, 20, 16),
            "children": 0,
            "shm_mib": 30.0,
            "folder_mib": 5 + 0.006 * STEP,
            "free_mib": 100_000.0,
        }
        files = {k: v for k, v in of_rank_1.items() if k in SHARED}
        tables.append(pd.DataFrame(level | (of_rank_1 if rank else files))[:looks])
    table = pd.concat(tables).sort_values("mono", kind="stable")

    def change(made: LaunchEvidence) -> LaunchEvidence:
        kept = {**made.files, "resources": (f"{made.launch.run_dir}/resources.csv", SHA)}
        return replace(made, resources=table, files=kept)

    return change


@pytest.mark.parametrize(
    ("grown", "words"),
    [
        ({"descriptors": 40 + STEP}, "rank 1 holds ever more open file descriptors"),
        ({"descriptors": 40 + 5 * (STEP // 300)}, "rank 1 holds ever more open file descriptors"),
        ({"threads": 16 + STEP // 4}, "rank 1 holds ever more threads"),
        ({"children": STEP // 40}, "rank 1 holds ever more children"),
        ({"shm_mib": 30 + STEP}, "files in /dev/shm grow by 1 MiB in each step"),
        ({"folder_mib": 5 + STEP}, "the launch's folder grows by 1 MiB in each step"),
        ({"free_mib": 100.0}, "100 MiB are free"),
    ],
)
def test_what_grows_with_the_steps_is_a_leak(grown: dict[str, Any], words: str) -> None:
    check = row("long_run", "memory_plateau", seen(**grown))
    says(check, (Outcome.FAIL, Reason.LEAK), words)
    assert check.measurement is not None and check.measurement.path.endswith("resources.csv")


def test_the_headline_says_what_is_held_at_the_end_of_production() -> None:
    """40, and one more in each of the 50,000 steps."""
    check = row("long_run", "memory_plateau", seen(descriptors=40 + STEP))
    assert check.title.startswith("Rank 1 holds ever more open file descriptors: ")
    assert check.title.endswith(", at this pace 50040 by the end of production.")


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (RSS_MIB + STEP, "rank 1 holds ever more memory that its heartbeats do not tell"),
        (
            np.where(np.arange(LOOKS) < LOOKS // 20, RSS_MIB, 2 * RSS_MIB),
            "rank 1 tells 30000 MiB less than the 60000 MiB that the kernel shows",
        ),
        (0.5 * RSS_MIB, "rank 1 tells 15000 MiB more than the 15000 MiB that the kernel shows"),
        # Told in millions of bytes.
        (RSS_MIB / 1.048576, "rank 1 tells 1390 MiB more than the 28610 MiB that the kernel shows"),
    ],
)
def test_memory_that_the_kernel_shows_and_no_heartbeat_tells(held: Any, words: str) -> None:
    check = row("long_run", "memory_plateau", seen(rss_mib=held))
    says(check, UNBALANCED, words, remedy="tell different things")


def test_what_keeps_its_level_passes_also_after_one_step_up() -> None:
    check = row("long_run", "memory_plateau", seen())
    assert check.outcome is Outcome.PASS and "files keep level" in check.reason
    # What a first save opens stays open, wherever in the launch it lies.
    for more in (4, 40):
        once = np.where(STEP > 900, 40 + more, 40)
        check = row("long_run", "memory_plateau", seen(descriptors=once, threads=once))
        assert check.outcome is Outcome.PASS, check.reason


@pytest.mark.parametrize(
    "held",
    [
        RSS_MIB + 16 * (STEP > 600),
        # A look meets a step anywhere, with its activations or without.
        RSS_MIB * (1 + np.arange(LOOKS) % 7),
        RSS_MIB + 2000 * (STEP < 300),
    ],
)
def test_memory_that_comes_and_goes_with_each_step_is_no_leak(held: Any) -> None:
    check = row("long_run", "memory_plateau", seen(rss_mib=held))
    assert check.outcome is Outcome.PASS, check.reason


def test_too_few_looks_are_told_and_not_judged() -> None:
    check = row("long_run", "memory_plateau", seen(7, descriptors=40 + STEP))
    assert check.outcome is Outcome.PASS and "too few looks at its processes" in check.reason


def test_looks_that_cannot_be_read_are_damage() -> None:
    """A PASS would say that nothing leaks, of what was never looked at."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        problem = f"{made.launch.run_dir}/resources.csv: the first line is not a header"
        return replace(made, resources=None, problems=(problem,))

    says(row("long_run", "memory_plateau", change), DAMAGED)
