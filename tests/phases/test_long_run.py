"""Long run: steady, without a halt, gates healthy, memory flat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from runbook.records import Outcome, Stop
from runbook.records.evidence import LaunchEvidence
from runbook.records.launch import option
from tests.phases import answers, builder, spoil, traces
from tests.phases.answers import WHERE, case, row, says
from tests.phases.trainer import SHA

CPU = builder.context("cpu")


FORCED = 2.625 / 3.25


def selecting(blocks: float, forced: float = FORCED) -> spoil.Change:
    """Statistics of a selection of 4 blocks of 16 at S = 128: means of 3.25, and 2.625 forced."""
    table = traces.gates(1200).assign(sel_blocks_mean=blocks, sel_forced_share=forced)
    of_a_query = spoil.at("env.config", {"nsa": {"l": 16, "l_sel": 16, "n_sel": 4}})
    return spoil.both(spoil.parts(gates=table), of_a_query, spoil.at("env.effective", seq_len=128))


def test_statistics_of_the_selection_are_told_and_its_size_is_that_of_the_config() -> None:
    """Requirements L5 and G10; the size follows from the shape, so another one is a fault."""
    check = row("long_run", "gates", selecting(3.25))
    assert "a query attends to 3.25 blocks, 81% of them forced" in check.reason
    words = "a query attends to 2 blocks, where n_sel=4, l_sel=16 and S=128 mean 3.25"
    says(row("long_run", "gates", selecting(2.0)), "FAIL mismatch", words)
    freer = row("long_run", "gates", selecting(3.25, 0.7))
    says(freer, "FAIL mismatch", "0.7 of its blocks are forced, where n_sel=4")
    assert "leave the learning rate alone" in freer.remedy and "padding is no block" in freer.remedy
    found = builder.evidence("long_run", WHERE, change=selecting(3.25))
    seen = builder.judge("long_run", found, WHERE)
    kept = {one.name: (one.value, one.unit, one.n) for one in seen.measurements}
    assert kept["sel_blocks_mean"] == (3.25, "blocks", 121)
    assert kept["sel_forced_share"] == (pytest.approx(FORCED), "share", 121)


OTHER_BYTES = spoil.every_rank(checkpoints=({"path": "checkpoints/step_240", "sha256": "b"},))


def test_checkpoints_of_one_step_hold_one_content() -> None:
    saved = spoil.every_rank(checkpoints=({"path": "checkpoints/step_240", "sha256": "a"},))
    same = row("long_run", "resumed", saved, CPU)
    assert "2 checkpoint(s) of one content, bit for bit" in same.reason
    differ = spoil.both(saved, spoil.of_launch("resumed", OTHER_BYTES))
    words = "its checkpoints of steps 240 hold something else than those of run"
    says(row("long_run", "resumed", differ, CPU), "FAIL mismatch", words)
    # A launch that was told to end left out the evaluation whose loss a checkpoint has.
    looked = spoil.of_launch("run", spoil.every_rank(evaluations=({"step": 240},)))
    says(row("long_run", "resumed", spoil.both(differ, looked), CPU), "PASS ok")


def test_two_more_launches_go_on_from_a_save_whose_number_has_a_digit_less() -> None:
    run, second, third = builder.PHASES["long_run"].plan(CPU)
    assert run.config_overrides["train.keep_every"] == second.after == 180
    assert (second.resumes, third.resumes, third.after) == ("run", "stopped", 0)
    assert second.stop == Stop(by="SIGTERM", steps=3)
    assert third.stop == Stop(by=".HALT", steps=60), "beyond the save of step 240"
    assert {option(one.argv, "--run-steps") for one in (run, second, third)} == {"500"}
    short = replace(CPU, steps_scale=0.05)
    assert [one.after for one in builder.PHASES["long_run"].plan(short)] == [0, 9, 0]
    without = replace(CPU, config_overrides={"train.save_every": 0})
    assert len(builder.PHASES["long_run"].plan(without)) == 1
    check = answers.row("long_run", "resumed", where=without)
    assert (check.outcome, check.required) == (Outcome.INCOMPLETE, True)
    assert "train.save_every=0 leaves no checkpoint" in check.reason


# A launch that keeps what it takes besides memory is no GO, and the reason names what.

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
        return spoil.parts(resources=table, files=kept)(made)

    return change


def unreadable(made: LaunchEvidence) -> LaunchEvidence:
    """A PASS would say that nothing leaks, of what was never looked at."""
    problem = f"{made.launch.run_dir}/resources.csv: the first line is not a header"
    return spoil.parts(resources=None, problems=(problem,))(made)


def held(rss_mib: Any, wanted: Any, *words: str, **more: Any) -> Any:
    return case("long_run", "memory_plateau", seen(rss_mib=rss_mib), wanted, *words, **more)


def grown(words: str, **more: Any) -> Any:
    return case("long_run", "memory_plateau", seen(**more), "FAIL leak", words)


OTHERWISE = {"remedy": "tell different things"}
TWICE = np.where(np.arange(LOOKS) < LOOKS // 20, RSS_MIB, 2 * RSS_MIB)
ONCE = [np.where(STEP > 900, 40 + more, 40) for more in (4, 40)]


@pytest.mark.parametrize("holds", [
    grown("rank 1 holds ever more open file descriptors", descriptors=40 + STEP),
    grown("rank 1 holds ever more open file descriptors", descriptors=40 + 5 * (STEP // 300)),
    grown("rank 1 holds ever more threads", threads=16 + STEP // 4),
    grown("rank 1 holds ever more children", children=STEP // 40),
    # One for each evaluation, beside others that come and go.
    grown("rank 1 holds ever more threads: at least 16, 17, 18, 19 in its quarters",
          threads=16 + (STEP - 1) // 300 + np.arange(LOOKS) % 3),
    grown("rank 1 holds ever more children: at least 0, 1, 2, 3 in its quarters",
          children=(STEP - 1) // 300),
    grown("files in /dev/shm grow by 1 MiB in each step", shm_mib=30 + STEP),
    grown("the launch's folder grows by 1 MiB in each step", folder_mib=5 + STEP),
    grown("100 MiB are free", free_mib=100.0),
    # Memory that the kernel shows and no heartbeat tells.
    held(RSS_MIB + STEP, "FAIL unbalanced", "memory that its heartbeats do not tell", **OTHERWISE),
    held(TWICE, "FAIL unbalanced",
         "rank 1 tells 30000 MiB less than the 60000 MiB that the kernel shows", **OTHERWISE),
    held(0.5 * RSS_MIB, "FAIL unbalanced",
         "rank 1 tells 15000 MiB more than the 15000 MiB that the kernel shows", **OTHERWISE),
    # Told in millions of bytes.
    held(RSS_MIB / 1.048576, "FAIL unbalanced",
         "rank 1 tells 1390 MiB more than the 28610 MiB that the kernel shows", **OTHERWISE),
    # Memory that comes and goes: a look meets a step anywhere, with its activations or without.
    held(RSS_MIB + 16 * (STEP > 600), "PASS ok"), held(RSS_MIB + 2000 * (STEP < 300), "PASS ok"),
    held(RSS_MIB * (1 + np.arange(LOOKS) % 7), "PASS ok"),
    # What keeps its level passes; what a first save opens stays open, wherever it lies.
    case("long_run", "memory_plateau", seen(), "PASS ok", "files keep level"),
    *(case("long_run", "memory_plateau", seen(descriptors=once, threads=once), "PASS ok",
           called="one step up") for once in ONCE),
    *(case("long_run", "memory_plateau", seen(looks, threads=often), "PASS ok", called=name)
      for name, looks, often in (("in two of four", LOOKS, 16 + (STEP > 320) + 2 * (STEP > 920)),
                                 ("too few looks", 19, 16 + np.arange(LOOKS) // 5))),
    case("long_run", "memory_plateau", seen(7, descriptors=40 + STEP), "PASS ok",
         "too few looks at its processes"),
    case("long_run", "memory_plateau", unreadable, "INVALID damaged_artifact"),
])  # fmt: skip
def test_what_grows_with_the_steps_is_a_leak(holds: Callable[[], None]) -> None:
    holds()
