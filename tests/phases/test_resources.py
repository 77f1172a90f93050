"""A launch that keeps what it takes besides memory is no GO, and the reason names what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from runbook.records import Outcome, Reason
from runbook.records.evidence import LaunchEvidence
from tests.phases import spoil
from tests.phases.answers import DAMAGED, FINE, UNBALANCED, case, row
from tests.phases.heartbeats import SHA

LOOKS = 60
STEP = np.linspace(20, 1200, LOOKS).round()
SHARED = ("shm_mib", "folder_mib", "free_mib")
# What the heartbeats of these launches tell.
RSS_MIB = 30_000.0
LEAK = (Outcome.FAIL, Reason.LEAK)


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
        return spoil.parts(resources=table, files=kept)(made)

    return change


def unreadable(made: LaunchEvidence) -> LaunchEvidence:
    """A PASS would say that nothing leaks, of what was never looked at."""
    problem = f"{made.launch.run_dir}/resources.csv: the first line is not a header"
    return spoil.parts(resources=None, problems=(problem,))(made)


def held(rss_mib: Any, wanted: Any, *words: str, **more: Any) -> Any:
    return case("long_run", "memory_plateau", seen(rss_mib=rss_mib), wanted, *words, **more)


def grown(words: str, **more: Any) -> Any:
    return case("long_run", "memory_plateau", seen(**more), LEAK, words)


OTHERWISE = {"remedy": "tell different things"}
TWICE = np.where(np.arange(LOOKS) < LOOKS // 20, RSS_MIB, 2 * RSS_MIB)
ONCE = [np.where(STEP > 900, 40 + more, 40) for more in (4, 40)]


@pytest.mark.parametrize("holds", [
    grown("rank 1 holds ever more open file descriptors", descriptors=40 + STEP),
    grown("rank 1 holds ever more open file descriptors", descriptors=40 + 5 * (STEP // 300)),
    grown("rank 1 holds ever more threads", threads=16 + STEP // 4),
    grown("rank 1 holds ever more children", children=STEP // 40),
    grown("files in /dev/shm grow by 1 MiB in each step", shm_mib=30 + STEP),
    grown("the launch's folder grows by 1 MiB in each step", folder_mib=5 + STEP),
    grown("100 MiB are free", free_mib=100.0),
    # Memory that the kernel shows and no heartbeat tells.
    held(RSS_MIB + STEP, UNBALANCED, "memory that its heartbeats do not tell", **OTHERWISE),
    held(TWICE, UNBALANCED,
         "rank 1 tells 30000 MiB less than the 60000 MiB that the kernel shows", **OTHERWISE),
    held(0.5 * RSS_MIB, UNBALANCED,
         "rank 1 tells 15000 MiB more than the 15000 MiB that the kernel shows", **OTHERWISE),
    # Memory that comes and goes: a look meets a step anywhere, with its activations or without.
    held(RSS_MIB + 16 * (STEP > 600), FINE), held(RSS_MIB + 2000 * (STEP < 300), FINE),
    held(RSS_MIB * (1 + np.arange(LOOKS) % 7), FINE),
    # What keeps its level passes; what a first save opens stays open, wherever it lies.
    case("long_run", "memory_plateau", seen(), FINE, "files keep level"),
    *(case("long_run", "memory_plateau", seen(descriptors=once, threads=once), FINE,
           called="one step up") for once in ONCE),
    case("long_run", "memory_plateau", seen(7, descriptors=40 + STEP), FINE,
         "too few looks at its processes"),
    case("long_run", "memory_plateau", unreadable, DAMAGED),
])  # fmt: skip
def test_what_grows_with_the_steps_is_a_leak(holds: Callable[[], None]) -> None:
    holds()


def test_the_headline_says_what_is_held_at_the_end_of_production() -> None:
    """40, and one more in each of the 50,000 steps."""
    check = row("long_run", "memory_plateau", seen(descriptors=40 + STEP))
    assert check.title.startswith("Rank 1 holds ever more open file descriptors: ")
    assert check.title.endswith(", at this pace 50040 by the end of production.")
    assert check.measurement.path.endswith("resources.csv")
