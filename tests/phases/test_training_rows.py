"""The rows that every training phase has, made to say each thing that they can say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.contract import proof_text
from phases.training.plausible import differences
from runbook.folder.launch.shapes import shape_of, shaped
from runbook.records import LaunchStatus, Outcome
from runbook.records.evidence import LaunchEvidence
from tests.phases import answers, builder, spoil, traces, trainer
from tests.phases.answers import case, says
from tests.phases.spoil import Change, at
from tests.tiers import examples

CPU = builder.context("cpu")


def below_its_floor(below: float) -> Change:
    """The mean of the last 50 steps lies so far below the floor of the data."""
    noise = np.random.default_rng(3).normal(0.0, 0.001, 50)

    def change(made: LaunchEvidence) -> LaunchEvidence:
        low = made.env["effective"]["loss_floor"] - below + noise
        return spoil.columns(loss=lambda table: [*table["loss"][:-50], *low])(made)

    return change


@pytest.mark.parametrize(("below", "wanted"), [(0.2, "INVALID not_plausible"), (0.0, "PASS ok")])
def test_no_loss_lies_below_the_floor_of_its_data(below: float, wanted: Any) -> None:
    says(answers.row("baseline", "plausible", below_its_floor(below)), wanted)


EXACT = {"policies": {"tf32_matmul": False, "float32_matmul_precision": "highest"}}
LEFT = {"git": {"sha": "1"}, "config": {"train": {"out_dir": "a", "lr": 1e-3}},
        "toggles": [{"name": "NSA_TB_DISABLE", "value": True}]}  # fmt: skip
RIGHT = {"git": {"sha": "2"}, "config": {"train": {"out_dir": "b", "lr": 2e-3}},
         "toggles": [{"name": "NSA_OPT_FUSED", "value": True}]}  # fmt: skip
OTHER = [
    "config.train.lr: 0.001 against 0.002",
    "git.sha: '1' against '2'",
    "toggles.NSA_OPT_FUSED: False against True",
]


@pytest.mark.parametrize(
    ("left", "right", "but", "found"),
    [
        # Facts of checkout, versions, device and config count; where results go does not.
        (LEFT, RIGHT, (), OTHER),
        (LEFT, RIGHT, ("git.sha", "config.train.lr"), OTHER[2:]),
        (EXACT, {"policies": {**EXACT["policies"], "sdpa_kernels": {"flash": True}}}, (), []),
        (EXACT, {"policies": {**EXACT["policies"], "tf32_matmul": True}}, (),
         ["policies.tf32_matmul: False against True"]),
    ],
)  # fmt: skip
def test_what_makes_two_launches_unlike(left: Any, right: Any, but: Any, found: list[str]) -> None:
    assert differences(left, right, but=but) == found


@examples(40)
@given(
    phase=st.sampled_from(["baseline", "bucket_sweep", "fused_adamw", "single_gpu", "long_run"]),
    column=st.sampled_from(["loss", "toks_per_s", "tokens", "dt_s", "mem_mib", "fetch_s"]),
    value=st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e30]),
    share=st.sampled_from([0.01, 1.0]),
    keep=st.integers(1, 400),
)
def test_no_number_in_a_csv_can_stop_a_judgement(
    phase: str, column: str, value: float, share: float, keep: int
) -> None:
    def spoiled(table: pd.DataFrame) -> pd.DataFrame:
        kept = table.iloc[:keep].copy()
        kept[column] = kept[column].astype(float)
        kept.iloc[: max(1, int(share * len(kept))), kept.columns.get_loc(column)] = value
        return kept

    found = builder.evidence(phase, CPU, change=at("training.frame", spoiled))
    judgement = builder.judge(phase, found, CPU)
    if keep < 60 and phase in ("baseline", "single_gpu"):
        assert answers.get(judgement, f"{phase}.plausible").outcome is not Outcome.PASS


def test_a_second_attempt_beside_a_failure_hides_nothing() -> None:
    crashed = spoil.of_launch("stopped", spoil.ended(LaunchStatus.CRASHED))
    both = spoil.both(spoil.of_launch("run", spoil.result(attempts=2)), crashed)
    assert answers.row("long_run", "completed", both, CPU).outcome is Outcome.FAIL


def test_a_trainers_evidence_is_words_and_no_notation_of_a_language() -> None:
    assert proof_text({"fused": [True, False], "hook": None}) == "fused yes/no, hook None"


# The rows that need a second source, and what they are worth: unbalanced numbers do not count.

ROWS = ("accounts", "gradients", "oracle")
CPU = builder.context("cpu")


@pytest.mark.parametrize("name", ["a100x2_pcie4", "h200x1", "cpu"])
@pytest.mark.parametrize("phase", builder.TRAINING)
def test_every_training_phase_requires_them(phase: str, name: str) -> None:
    where = builder.context(name)
    required = set(where.profile.required)
    assert {f"{phase}.{row}" for row in ROWS} <= required or f"{phase}.completed" not in required


def _faster(made: LaunchEvidence) -> LaunchEvidence:
    """The trainer writes half of each step's time; its heartbeats keep the clock's."""
    kept = made.ranks
    return at("ranks", tuple(map(replace, kept)))(spoil.slower(0.5)(made))


def _every_other(made: LaunchEvidence) -> LaunchEvidence:
    return spoil.rank(0, checkpoints=made.ranks[0].checkpoints[1::2])(made)


def _large(made: LaunchEvidence) -> LaunchEvidence:
    """Weights of rank 1 that begin ten times too large."""
    weights = made.ranks[1].proof["weights"]
    down = {**weights["mlp.down"], "rms": [10 * rms for rms in weights["mlp.down"]["rms"]]}
    return at("ranks.1.proof.weights", {**weights, "mlp.down": down})(made)


@pytest.mark.parametrize("holds", [
    case("baseline", "accounts", _faster, "FAIL unbalanced", "dt_s sums to 0.500"),
    # Another selection than the config means, in every phase that reads it.
    case("baseline", "accounts", at("gates", traces.gates(60).assign(sel_blocks_mean=2.5)),
         "FAIL mismatch", "a query attends to 2.5 blocks, where n_sel=",
         remedy="statistics are wrong"),
    case("long_run", "accounts", _every_other, "FAIL unbalanced", "no checkpoint of step 60, 180",
         remedy="look at the condition under which the trainer begins a save", where=CPU,
         only=("run",)),
    case("baseline", "oracle", _large, "FAIL mismatch",
         "rank 1: mlp.down begins with a deviation of 0.04082, has to be 0.004082",
         remedy="look at how the trainer draws its weights", where=CPU),
])  # fmt: skip
def test_a_launch_that_does_not_balance_fails(holds: Callable[[], None]) -> None:
    holds()


@pytest.mark.parametrize(
    ("share", "rate", "wanted"),
    [
        (0.0, 39.3, "PASS ok"),
        (-0.015, 39.3, "PASS ok"),
        (0.015, 39.3, "FAIL below_limit"),
        (0.03, 39.3, "FAIL unbalanced"),
    ],
)
def test_the_slower_clock_decides(share: float, rate: float, wanted: Any) -> None:
    """39.3 tok/s by dt_s reach the floor of 39; 1.5 % longer by a rank's clock they do not."""
    later = spoil.steps_of(1, mono=lambda steps: 1000.0 + (steps["mono"] - 1000.0) * (1 + share))
    check = says(answers.row("baseline", "throughput", later, rate=rate), wanted)
    if share < 0.03:
        assert check.measurement.value == pytest.approx(rate / (1 + max(share, 0.0)), rel=1e-4)
        assert any("heartbeat_rank1" in path for path in check.evidence) is (share > 0)


def test_a_damaged_result_does_not_hide_the_kernel_that_failed() -> None:
    failed = {"agrees": False, "refused": None, "problems": ["k_win is off by 0.2 of itself"]}
    attention = {"self_test": {"ran": True, "paths": {"varlen": failed, "masked": 5}}}

    def change(made: LaunchEvidence) -> LaunchEvidence:
        kept, problems = shaped({**made.env, "attention": attention}, shape_of("env"), "env.json")
        return spoil.parts(env=kept, problems=(*made.problems, *problems))(made)

    says(
        answers.row("baseline", "oracle", change),
        "INVALID damaged_artifact",
        "env.json.attention.self_test.paths",
    )


def test_what_was_learned_is_held_against_the_limit_with_four_standard_errors() -> None:
    losses = spoil.columns(loss=lambda t: 3.0 + 0.5 * np.sign(np.sin(math.pi * (t["step"] - 0.5))))
    check = answers.row("long_run", "learns", losses)
    # The last 50 steps are 2.5 and 3.5 in turn: mean 3, standard error 0.5 / sqrt(50).
    worst = 3.0 + 4 * 0.5 / math.sqrt(50)
    share = (trainer.FLOOR - worst) / (trainer.FLOOR - trainer.ENTROPY)
    assert check.measurement.value == pytest.approx(share)
    assert (check.outcome, check.limit) == (Outcome.PASS, 0.1)
