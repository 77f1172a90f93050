"""Steps with something beside them: its time is none of theirs, and all of theirs is counted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from runbook.accounts.between_steps import restart_account
from runbook.folder.launch.rank_log import read_heartbeats
from tests.accounts.launches import Ranks, honest, steps_of
from tests.factory.files import beat

EVALUATED = ("eval_start", "eval")
SAVED = ("eval_start", "eval", "checkpoint_start", "checkpoint")
TWICE = ("recomputed",)
DUMPED = ("memory_dump",)


def doing(
    kinds: Collection[str], steps: Collection[int], took_s: float, *, counted: bool
) -> tuple[pd.DataFrame, Ranks]:
    """A launch in which something took so long before these steps ended.

    counted: as a step's time, by right; else it lies before the mark from which a step is timed.
    """
    table, ranks = honest()
    here = table["step"].isin(steps)
    more = np.where(here, took_s, 0.0)
    if counted:
        table = table.assign(dt_s=table["dt_s"] + more)
    mono = 500.0 + (table["dt_s"] + (0.0 if counted else more)).cumsum()
    for number in range(len(ranks)):
        ranks = steps_of(ranks, number, mono=mono, timed_from=mono - table["dt_s"])
    beside = {step: frozenset(kinds) for step in steps}
    return table, tuple(replace(rank, beside=beside) for rank in ranks)


def told(table: pd.DataFrame, steps: Collection[int], seconds: float) -> pd.DataFrame:
    """The same table, in which these steps took so much longer."""
    return table.assign(dt_s=table["dt_s"] + np.where(table["step"].isin(steps), seconds, 0.0))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    ("kinds", "counted"), [(EVALUATED, False), (SAVED, False), (TWICE, False), (DUMPED, True)]
)
def test_a_step_is_timed_from_where_what_is_beside_it_ends(
    kinds: Collection[str], counted: bool, lag: int
) -> None:
    table, ranks = doing(kinds, (21, 31, 41), 9.0, counted=counted)
    assert restart_account(table, ranks, lag=lag) == []


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("kinds", [EVALUATED, SAVED])
def test_an_evaluation_that_counts_as_a_step_is_noticed(kinds: Collection[str], lag: int) -> None:
    table, ranks = doing(kinds, (31,), 9.0, counted=False)
    (problem,) = restart_account(told(table, (31,), 9.0), ranks, lag=lag)
    assert problem.startswith("dt_s of step 31 is 9.0")
    assert "s, by rank 0's clock the step took 0.0" in problem
    assert problem.endswith("(1 such steps) after an evaluation or a save")


def test_a_short_evaluation_that_counts_is_noticed_in_the_middle_of_three() -> None:
    steps = (21, 31, 41)
    table, ranks = doing(EVALUATED, steps, 0.03, counted=False)
    assert restart_account(table, ranks) == []
    assert len(restart_account(told(table, steps, 0.03), ranks)) == 1
    # One may be a pause of the machine between the mark and the clock.
    assert restart_account(told(table, (21,), 0.03), ranks) == []
    assert restart_account(told(table, steps, 0.014), ranks) == []


@pytest.mark.parametrize(
    ("late_s", "found"),
    [((0.48,), 0), ((0.52,), 1), ((0.48, 0.09), 0), ((0.48, 0.12), 1), ((0.12, -0.12), 1)],
)
def test_one_pause_of_the_machine_is_no_fraud_and_two_are(
    late_s: tuple[float, ...], found: int
) -> None:
    table, ranks = doing(EVALUATED, (11, 21, 31, 41, 51), 9.0, counted=False)
    for step, seconds in zip((21, 41), late_s, strict=False):
        table = told(table, (step,), seconds)
    assert len(restart_account(table, ranks)) == found


def test_time_that_a_step_leaves_out_is_noticed() -> None:
    steps = (21, 31, 41)
    table, ranks = doing(EVALUATED, steps, 9.0, counted=False)
    assert len(restart_account(told(table, steps, -0.02), ranks)) == 1


def test_a_second_computation_that_counts_as_a_step_is_noticed() -> None:
    """Ten steps of 10 ms, in each of which the second computation takes 2 ms."""
    steps = range(5, 55, 5)
    table, ranks = doing(TWICE, steps, 0.002, counted=False)
    assert restart_account(table, ranks) == []
    (problem,) = restart_account(told(table, steps, 0.002), ranks)
    assert problem.endswith("(10 such steps) after their second computation")
    assert restart_account(told(table, steps, 0.002), ranks, lag=1) == []


@pytest.mark.parametrize("kind", ["memory_dump", "checkpoint"])
def test_what_happens_in_a_step_is_its_time(kind: str) -> None:
    """A save that ends, or a dump, of 0.7 s: counted by right, and then left out."""
    table, ranks = doing((kind,), (21, 31, 41), 0.7, counted=True)
    assert restart_account(table, ranks) == []
    (problem,) = restart_account(told(table, (31,), -0.7), ranks)
    assert problem.startswith("dt_s of step 31 ")
    assert problem.endswith("with a dump or the end of a save beside them")


def test_a_host_that_is_ahead_of_its_device_is_no_fraud() -> None:
    """On CUDA the host notes the first steps after an evaluation before the device ends them."""
    table, ranks = doing(EVALUATED, (21, 31, 41), 9.0, counted=False)
    steps = ranks[0].steps
    first = steps["step"].isin((21, 31, 41))
    mono = steps["mono"] - np.where(first, 0.9 * table["dt_s"], 0.0)
    ahead = steps_of(ranks, 0, mono=mono)
    assert restart_account(table, ahead, lag=1) == []


def test_a_profiler_leaves_a_step_out() -> None:
    table, ranks = doing((*EVALUATED, "profiler"), (31,), 9.0, counted=False)
    assert restart_account(told(table, (31,), 9.0), ranks) == []


def test_marks_that_are_missing_are_no_balance() -> None:
    table, ranks = honest()
    steps = ranks[0].steps
    bare = (replace(ranks[0], steps=steps.drop(columns="timed_from")),)
    assert restart_account(table, bare) == ["rank 0 does not mark where its steps begin"]


def test_the_mark_is_the_last_one_before_the_steps_time_begins(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat_rank0.jsonl"
    text = ""
    for step in (1, 2, 3):
        text += beat("step_start", step=step, mono=float(step))
        text += beat("fetched", step=step, mono=step + 0.1)
        if step == 2:
            text += beat("recomputed", step=step, mono=step + 0.3)
        text += beat("step_end", step=step, mono=step + 0.9)
    path.write_text(text)
    log = read_heartbeats(path, rank=0, relative_to=tmp_path)
    assert log.steps["timed_from"].tolist() == [1.0, 2.3, 3.0]
    assert log.beside == {2: frozenset({"recomputed"})}
