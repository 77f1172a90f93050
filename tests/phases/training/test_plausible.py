"""Which numbers of one launch are impossible, at the edge of what is possible."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from phases.kit.case import Case
from phases.training.plausible import (
    differences,
    loss_problems,
    mfu_of,
    step_problems,
    time_problems,
    token_problems,
)
from runbook.records.evidence import PhaseEvidence, TrainingLog
from tests.phases import answers, builder, env_files, spoil
from tests.phases.answers import UNLIKE, WHERE, says

EFFECTIVE: dict[str, Any] = {
    "seq_len": 128,
    "global_batch": 4,
    "accumulation": 2,
    "tokens_per_step": 1024,
    "vocab_size": 256,
    "loss_floor": None,
}
START = math.log(256)


def log(**columns: Any) -> TrainingLog:
    """Three steps of 1,024 tokens in half a second each; columns replaced."""
    table = {
        "step": [1, 2, 3],
        "loss": [START, START - 0.01, START - 0.02],
        "tokens": [1024] * 3,
        "dt_s": [0.5] * 3,
        "toks_per_s": [2048.0] * 3,
    }
    return TrainingLog(frame=pd.DataFrame(table | columns), path="training.csv", sha256="5" * 64)


def test_a_healthy_log_has_no_problem() -> None:
    assert step_problems(log()) == []
    assert token_problems(log(), EFFECTIVE, 3) == []
    assert time_problems(log(), 1.5) == []
    assert loss_problems(log(), EFFECTIVE) == []


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([2, 3, 4], "row 1 is step 2"),
        ([1, 3, 4], "row 2 is step 3"),
        ([1, 2, 2], "row 3 is step 2"),
    ],
)
def test_steps_begin_at_one_and_follow_each_other(steps: list[int], says: str) -> None:
    (problem,) = step_problems(log(step=steps))
    assert problem.startswith(says)


@pytest.mark.parametrize("name", ["seq_len", "global_batch", "accumulation"])
def test_tokens_per_step_are_the_product(name: str) -> None:
    problems = token_problems(log(), EFFECTIVE | {name: EFFECTIVE[name] + 1}, 3)
    assert problems and "tokens per step 1024, but S x batch x accumulation is" in problems[0]


def test_tokens_of_all_rows_are_counted() -> None:
    assert token_problems(log(tokens=[1024, 1024, 1023]), EFFECTIVE, 3) == [
        "3071 tokens in 3 steps, expected 3072"
    ]


@pytest.mark.parametrize(
    ("planned", "stopped", "fine"),
    [(3, False, True), (4, False, False), (4, True, True), (2, True, False), (3, True, True)],
)
def test_only_a_launch_that_stopped_early_may_have_fewer_rows(
    planned: int, stopped: bool, fine: bool
) -> None:
    problems = token_problems(log(), EFFECTIVE, planned, stopped=stopped)
    assert problems == ([] if fine else [f"3 rows for {planned} steps"])


def test_times_fit_into_the_launch() -> None:
    assert time_problems(log(), 1.4) == ["steps sum to 1.5 s in a launch of 1.4 s"]
    assert time_problems(log(), 0.0) == []  # a judged folder may not say how long it took


def test_rates_are_tokens_over_time() -> None:
    (problem,) = time_problems(log(toks_per_s=[2048.0, 2048.0, 1700.0]), 9.0)
    assert problem == "toks_per_s is not tokens / dt_s at step 3"


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ([START, -0.001, 5.0], "the loss is -0.001 at step 2, which no cross-entropy can be"),
        ([START, math.nan, 5.0], "the loss is not finite in every step"),
        ([START] * 3, "in each of 3 steps"),
        ([1.0, 1.1, 1.2], "first loss 1.000, far from ln(256) = 5.545"),
    ],
)
def test_impossible_losses(losses: list[float], says: str) -> None:
    assert any(says in problem for problem in loss_problems(log(loss=losses), EFFECTIVE))


def test_two_equal_losses_may_be_chance() -> None:
    made = log()
    two = replace(made, frame=made.frame.iloc[:2].assign(loss=START))
    assert loss_problems(two, EFFECTIVE) == []


@pytest.mark.parametrize("size", [None, 0, 1])
def test_a_vocabulary_has_at_least_two_words(size: int | None) -> None:
    assert loss_problems(log(), EFFECTIVE | {"vocab_size": size}) == [
        "env.json has no vocabulary size"
    ]
    assert loss_problems(log(loss=[0.69, 0.68, 0.67]), EFFECTIVE | {"vocab_size": 2}) == []


def test_a_mean_below_the_floor_has_seen_the_future() -> None:
    """Judged is the mean of the last 50 steps, with four standard errors of patience."""
    steps = 200
    rng = np.random.default_rng(3)
    losses = np.linspace(START, 1.2, steps)
    losses[-50:] = 1.0 + rng.normal(0.0, 0.001, 50)

    def said(floor: float) -> list[str]:
        table = {"step": np.arange(1, steps + 1), "loss": losses}
        made = replace(log(), frame=pd.DataFrame(table))
        return loss_problems(made, EFFECTIVE | {"loss_floor": floor})

    assert said(1.0) == []
    (problem,) = said(1.2)
    assert problem == "mean loss 1.000 of the last 50 steps is below the floor 1.200"


def test_mfu_is_achieved_over_peak_of_all_ranks() -> None:
    env = {"world_size": 2, "effective": {"model_flops_per_token": 5e8}}
    case = Case(phase="baseline", evidence=PhaseEvidence(launches={}), context=WHERE)
    # 5e8 FLOPs per token at 1e5 tok/s on two cards of 312 TFLOP/s.
    assert mfu_of(case, env, 1e5) == pytest.approx(5e13 / 624e12)
    assert mfu_of(case, {"world_size": 2}, 1e5) is None
    assert mfu_of(case, {**env, "effective": {"model_flops_per_token": 0.0}}, 1e5) is None


@pytest.mark.parametrize(
    ("name", "other"), [("tf32_matmul", True), ("float32_matmul_precision", "medium")]
)
def test_launches_of_other_precision_are_unlike(name: str, other: object) -> None:
    exact = {"tf32_matmul": False, "float32_matmul_precision": "highest"}
    kernels = {"sdpa_kernels": {"flash": True}}
    rough = {**exact, name: other, "sdpa_kernels": {"flash": False}}
    assert differences({"policies": exact}, {"policies": {**exact, **kernels}}) == []
    (found,) = differences({"policies": exact}, {"policies": rough})
    assert found.startswith(f"policies.{name}: ")


def test_what_makes_two_launches_unlike() -> None:
    """Facts of checkout, versions, device and config count; where results go does not."""
    left = {
        "git": {"sha": "1" * 40},
        "config": {"train": {"out_dir": "a", "lr": 1e-3}},
        "toggles": [{"name": "NSA_TB_DISABLE", "value": True}],
    }
    right = {
        "git": {"sha": "2" * 40},
        "config": {"train": {"out_dir": "b", "lr": 2e-3}},
        "toggles": [{"name": "NSA_OPT_FUSED", "value": True}],
    }
    assert differences(left, left) == []
    assert differences(left, right) == [
        "config.train.lr: 0.001 against 0.002",
        f"git.sha: '{'1' * 40}' against '{'2' * 40}'",
        "toggles.NSA_OPT_FUSED: False against True",
    ]
    assert differences(left, right, but=("git.sha", "config.train.lr")) == [
        "toggles.NSA_OPT_FUSED: False against True"
    ]


def test_a_window_that_fell_back_in_one_launch_is_unlike_and_named() -> None:
    where = builder.context()

    masked = spoil.env(attention=env_files.attention(where.profile.workload, "masked", "varlen"))
    for phase in ("baseline", "single_gpu"):
        planned = (launch.name for launch in builder.PHASES[phase].plan(where))
        name = [one for one in planned if one.startswith("run")][2]
        check = answers.row(phase, "comparable", masked, where, only=[name])
        says(check, UNLIKE, "attention.window.value: 'varlen' against 'masked'", name)
