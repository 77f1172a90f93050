"""Long run: steady, without a halt, gates healthy, memory flat."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from runbook.records import Outcome, Reason
from runbook.records.evidence import LaunchEvidence
from tests.phases import builder, spoil, traces
from tests.phases.answers import NOTHING, TOO_MUCH, WHERE, row, said


def second_rank(**values: float) -> spoil.Change:
    """What rank 1 says of its steps, changed."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        steps = made.ranks[1].steps
        assert steps is not None
        return spoil.rank(1, steps=steps.assign(**values))(made)

    return change


def drifting(made: LaunchEvidence) -> LaunchEvidence:
    assert made.training is not None
    rise = np.linspace(1.0, 1.3, len(made.training.frame))
    table = made.training.frame.copy()
    table["dt_s"] *= rise
    table["toks_per_s"] /= rise
    return replace(made, training=replace(made.training, frame=table))


def pausing(made: LaunchEvidence) -> LaunchEvidence:
    assert made.training is not None
    slow = np.where(np.arange(len(made.training.frame)) % 50 == 49, 5.0, 1.0)
    table = made.training.frame.copy()
    table["dt_s"] *= slow
    table["toks_per_s"] /= slow
    return replace(made, training=replace(made.training, frame=table))


def rough(made: LaunchEvidence) -> LaunchEvidence:
    assert made.training is not None
    return replace(made, training=spoil.jittered(made.training, 0.25))


leaking = spoil.columns(mem_mib=lambda table: 30_000.0 + 1.0 * table["step"])


def gates(**health: float) -> spoil.Change:
    return spoil.parts(gates=traces.gates(1200, **health))


COLLAPSED = (Outcome.FAIL, Reason.BELOW_LIMIT)


@pytest.mark.parametrize(
    ("what", "change", "expected"),
    [
        ("no_halt", spoil.parts(halted=True), (Outcome.FAIL, Reason.HALTED)),
        ("no_halt", spoil.rank(1, halt_reason="gates"), (Outcome.FAIL, Reason.HALTED)),
        ("steady", drifting, (Outcome.FAIL, Reason.BELOW_LIMIT)),
        ("steady", pausing, (Outcome.FAIL, Reason.BELOW_LIMIT)),
        ("steady", rough, (Outcome.INCONCLUSIVE, Reason.UNDECIDED)),
        (
            "gates",
            spoil.parts(gates=traces.gates(1200, entropy=0.1)),
            (Outcome.FAIL, Reason.BELOW_LIMIT),
        ),
        (
            "gates",
            spoil.parts(gates=traces.gates(1200, max_gate=0.95)),
            (Outcome.FAIL, Reason.BELOW_LIMIT),
        ),
        (
            "gates",
            spoil.parts(gates=traces.gates(1200, entropy=math.nan)),
            (Outcome.FAIL, Reason.BELOW_LIMIT),
        ),
        ("gates", spoil.parts(gates=None), NOTHING),
        ("memory_plateau", leaking, (Outcome.FAIL, Reason.LEAK)),
        (
            "memory_plateau",
            spoil.columns(mem_mib=math.nan),
            NOTHING,
        ),
        (
            "memory_limit",
            second_rank(mem_mib=70_000.0),
            TOO_MUCH,
        ),
        (
            "memory_limit",
            second_rank(mem_mib=math.nan),
            NOTHING,
        ),
        ("memory_limit", second_rank(reserved_mib=70_000.0, cuda_mib=5_000.0), TOO_MUCH),
        ("memory_limit", second_rank(reserved_mib=math.nan), NOTHING),
    ],
)
def test_long_run_rows(what: str, change: spoil.Change, expected: tuple[Outcome, Reason]) -> None:
    assert row("long_run", what).outcome is Outcome.PASS
    check = row("long_run", what, change)
    assert said(check) == expected, check.reason


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
        assert made.env is not None
        env = made.env | {"config": {"nsa": {"l": 16, "l_sel": 16, "n_sel": 4}}}
        env["effective"] = env["effective"] | {"seq_len": 128}
        return replace(made, gates=table, env=env)

    return change


def test_statistics_of_the_selection_are_told_and_its_size_is_that_of_the_config() -> None:
    """Requirements L5 and G10; the size follows from the shape, so another one is a fault."""
    check = row("long_run", "gates", selecting(3.25))
    assert "a query attends to 3.25 blocks, 81% of them forced" in check.reason
    fewer = row("long_run", "gates", selecting(2.0))
    assert said(fewer) == (Outcome.FAIL, Reason.MISMATCH)
    assert (
        "a query attends to 2 blocks, where n_sel=4, l_sel=16 and S=128 mean 3.25" in fewer.reason
    )
    freer = row("long_run", "gates", selecting(3.25, 0.7))
    assert said(freer) == (Outcome.FAIL, Reason.MISMATCH)
    assert "0.7 of its blocks are forced, where n_sel=4" in freer.reason
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


def test_the_long_run_keeps_its_curves() -> None:
    judgement = builder.judge("long_run", builder.evidence("long_run", WHERE), WHERE)
    kept = [(curve.group, curve.label) for curve in judgement.series]
    ranks = [f"rank {rank}" for rank in range(WHERE.profile.ranks)]
    assert kept == [
        ("throughput", "run"),
        ("loss", "run"),
        *(("memory", rank) for rank in ranks),
        *(("tensors", rank) for rank in ranks),
        ("gates", "entropy over ln 3"),
        ("gates", "largest share of a branch"),
    ]
    memory = next(curve for curve in judgement.series if curve.group == "memory")
    assert [mark.value for mark in memory.limits] == [60 * 1024]
