"""Long run: steady, without a halt, gates healthy, memory flat."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runbook.config.phase import PlanContext
from runbook.records import Begun, Check, LaunchStatus, Outcome, RankExit, Reason, Stop, Stopped
from runbook.records.evidence import LaunchEvidence
from runbook.records.launch import option
from tests.phases import answers, builder, spoil, traces
from tests.phases.answers import (
    NOTHING,
    TOO_FEW,
    TOO_LITTLE,
    TOO_MUCH,
    WHERE,
    WRONG,
    row,
    says,
)
from tests.phases.heartbeats import SHA


def second_rank(**values: Any) -> spoil.Change:
    """What rank 1 says of its steps, changed."""
    return spoil.steps_of(1, **values)


drifting = spoil.slower(lambda table: np.linspace(1.0, 1.3, len(table)))
pausing = spoil.slower(lambda table: np.where(np.arange(len(table)) % 50 == 49, 5.0, 1.0))
rough = spoil.jitter(0.25)
leaking = spoil.columns(mem_mib=lambda table: 30_000.0 + 1.0 * table["step"])


leaking_on_rank_1 = second_rank(mem_mib=lambda steps: 30_000.0 + 1.0 * steps["step"])
HALTED = (Outcome.FAIL, Reason.HALTED)


def gates(**health: float) -> spoil.Change:
    return spoil.parts(gates=traces.gates(1200, **health))


@pytest.mark.parametrize(
    ("what", "change", "expected"),
    [
        ("no_halt", spoil.parts(halted=True), HALTED),
        ("no_halt", spoil.rank(1, halt_reason="gates"), HALTED),
        ("steady", drifting, TOO_LITTLE),
        ("steady", pausing, TOO_LITTLE),
        ("steady", rough, (Outcome.INCONCLUSIVE, Reason.UNDECIDED)),
        ("gates", gates(entropy=0.1), TOO_LITTLE),
        ("gates", gates(max_gate=0.95), TOO_LITTLE),
        ("gates", gates(entropy=math.nan), TOO_LITTLE),
        ("gates", spoil.parts(gates=None), NOTHING),
        ("memory_plateau", leaking, (Outcome.FAIL, Reason.LEAK)),
        ("memory_plateau", leaking_on_rank_1, (Outcome.FAIL, Reason.LEAK)),
        ("memory_plateau", spoil.columns(mem_mib=math.nan), NOTHING),
        ("memory_limit", second_rank(mem_mib=70_000.0), TOO_MUCH),
        ("memory_limit", second_rank(mem_mib=math.nan), NOTHING),
        ("memory_limit", second_rank(reserved_mib=70_000.0, cuda_mib=5_000.0), TOO_MUCH),
        ("memory_limit", second_rank(reserved_mib=math.nan), NOTHING),
    ],
)
def test_long_run_rows(what: str, change: spoil.Change, expected: tuple[Outcome, Reason]) -> None:
    assert row("long_run", what).outcome is Outcome.PASS
    says(row("long_run", what, change), expected)


def test_the_memory_told_is_that_of_the_rank_that_may_need_most() -> None:
    for more, worst in ((1.1, 1), (0.9, 0)):
        check = row("long_run", "memory_plateau", second_rank(mem_mib=more * 30_000.0))
        assert check.outcome is Outcome.PASS and check.measurement is not None
        assert f"heartbeat_rank{worst}.jsonl" in check.measurement.path
        assert check.reason.startswith(f"rank {worst}: ")


def test_the_memory_limit_is_for_the_peak_and_not_for_what_is_left_between_steps() -> None:
    check = row("long_run", "memory_limit", second_rank(reserved_mib=70_000.0, cuda_mib=5_000.0))
    assert "70000 MiB held by the allocator at most, 30000 MiB of it by tensors" in check.reason
    cpu = row("long_run", "memory_limit", second_rank(reserved_mib=9e9), builder.context("cpu"))
    assert cpu.outcome is Outcome.PASS


def test_two_bad_gate_readings_are_no_collapse_and_three_are() -> None:
    for bad, outcome in ((2, Outcome.PASS), (3, Outcome.FAIL)):
        health = traces.gates(1200)
        health.loc[10 : 9 + bad, "entropy"] = 0.05
        check = row("long_run", "gates", spoil.parts(gates=health))
        assert check.outcome is outcome, check.reason
    assert f"from step {health.loc[10, 'step']} (3 readings in a row)" in check.reason


FORCED = 2.625 / 3.25


def selecting(blocks: float, forced: float = FORCED) -> spoil.Change:
    """Statistics of a selection of 4 blocks of 16 at S = 128: means of 3.25, and 2.625 forced."""
    table = traces.gates(1200).assign(sel_blocks_mean=blocks, sel_forced_share=forced)

    def change(made: LaunchEvidence) -> LaunchEvidence:
        env = made.env | {"config": {"nsa": {"l": 16, "l_sel": 16, "n_sel": 4}}}
        env["effective"] = env["effective"] | {"seq_len": 128}
        return replace(made, gates=table, env=env)

    return change


def test_statistics_of_the_selection_are_told_and_its_size_is_that_of_the_config() -> None:
    """Requirements L5 and G10; the size follows from the shape, so another one is a fault."""
    check = row("long_run", "gates", selecting(3.25))
    assert "a query attends to 3.25 blocks, 81% of them forced" in check.reason
    fewer = row("long_run", "gates", selecting(2.0))
    says(fewer, WRONG, "a query attends to 2 blocks, where n_sel=4, l_sel=16 and S=128 mean 3.25")
    freer = row("long_run", "gates", selecting(3.25, 0.7))
    says(freer, WRONG, "0.7 of its blocks are forced, where n_sel=4")
    assert "leave the learning rate alone" in freer.remedy and "padding is no block" in freer.remedy
    assert "no statistics of the selection" in row("long_run", "gates").reason
    seen = builder.judge(
        "long_run", builder.evidence("long_run", WHERE, change=selecting(3.25)), WHERE
    )
    kept = {one.name: (one.value, one.unit, one.n) for one in seen.measurements}
    assert kept["sel_blocks_mean"] == (3.25, "blocks", 121)
    assert kept["sel_forced_share"] == (pytest.approx(FORCED), "share", 121)


def test_a_cpu_shows_its_steadiness_and_gates_its_memory() -> None:
    where = builder.context("cpu")
    assert row("long_run", "steady", drifting, where).code is Reason.NOT_GATED
    assert row("long_run", "memory_plateau", None, where).outcome is Outcome.PASS


CPU = builder.context("cpu")


def spoiled(what: str, change: spoil.Change, name: str, where: PlanContext = CPU) -> Check:
    """A row of the launches that are stopped, one of which was spoiled."""
    found = builder.evidence("long_run", where)
    launches = {**found.launches, name: change(found.launches[name])}
    return builder.row("long_run", what, replace(found, launches=launches), where)


def of_step(row: int, rank: int, **values: Any) -> spoil.Change:
    """What a rank tells of one of its steps, changed."""

    return spoil.steps_of(
        rank,
        **{
            column: lambda table, column=column, value=value: [
                *table[column][:row], value, *table[column][row + 1 :]
            ]
            for column, value in values.items()
        },
    )  # fmt: skip


def later(column: str) -> spoil.Change:
    """Another number from the second step on."""
    return spoil.columns(**{column: lambda t: t[column].where(t.index < 1, t[column] * 1.01)})


IGNORED = spoil.result(ranks=(RankExit(rank=0, code=0), RankExit(rank=1, code=0)))
ONE_WENT_ON = spoil.result(ranks=(RankExit(rank=0, code=0), RankExit(rank=1, code=13)))
SLOW_TO_SEE = spoil.result(stopped=Stopped(step=186, mono=1000.0))
UNSAVED = spoil.every_rank(checkpoints=({"path": "checkpoints/step_180"},))
OTHER_BYTES = spoil.every_rank(checkpoints=({"path": "checkpoints/step_240", "sha256": "b"},))
FROM_180 = spoil.result(begun=Begun(path="long_run/run/checkpoints/step_180", step=180, sha256=SHA))
CRASHED = spoil.ended(LaunchStatus.CRASHED)


@pytest.mark.parametrize(
    ("what", "name", "change", "says"),
    [
        ("stopped", "stopped", IGNORED, "SIGTERM came at step 183, and it ended after step 184, "
         "rank 0 with 0, rank 1 with 0; 13 was due"),
        ("stopped", "stopped", ONE_WENT_ON, "rank 0 with 0; 13 was due"),
        ("stopped", "resumed", IGNORED, "rank 1 with 0; 10 was due"),
        ("stopped", "stopped", SLOW_TO_SEE, "rank 0 ended 4 more steps; at most 2 may"),
        ("stopped", "stopped", UNSAVED, "left no checkpoint of step 184, its last; the newest"),
        ("stopped", "stopped", CRASHED, "crashed"),
        ("resumed", "resumed", of_step(0, 1, data="f" * 16),
         "resumed goes on from step 184, and at step 185 rank 1 reads other data than in run"),
        ("resumed", "stopped", later("loss"), "from step 182 its loss is not run's"),
        ("resumed", "stopped", later("grad_norm"), "its grad_norm at step 182 is 1.01, in run 1"),
        ("resumed", "resumed", later("lr"), "its lr at step 186 is 0.000202, in run 0.0002"),
        ("resumed", "resumed", FROM_180, "from step 180, and stopped was stopped after step 184"),
    ],
)  # fmt: skip
def test_a_launch_that_is_stopped_and_goes_on(
    what: str, name: str, change: spoil.Change, says: str
) -> None:
    whole = answers.row("long_run", what, where=CPU)
    assert whole.outcome is Outcome.PASS, whole.reason
    check = spoiled(what, change, name)
    assert check.outcome is Outcome.FAIL, check.reason
    assert says in check.reason


def test_checkpoints_of_one_step_hold_one_content() -> None:
    saved = spoil.every_rank(checkpoints=({"path": "checkpoints/step_240", "sha256": "a"},))
    found = builder.evidence("long_run", CPU)
    launches = {name: saved(made) for name, made in found.launches.items()}
    same = builder.row("long_run", "resumed", replace(found, launches=launches), CPU)
    assert "2 checkpoint(s) of one content, bit for bit" in same.reason
    launches["resumed"] = OTHER_BYTES(launches["resumed"])
    other = builder.row("long_run", "resumed", replace(found, launches=launches), CPU)
    says(other, WRONG, "its checkpoints of steps 240 hold something else than those of run")


def test_a_launch_that_ended_before_it_was_told_to_decides_nothing() -> None:
    says(spoiled("stopped", spoil.result(stopped=None), "resumed"), TOO_FEW)


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
