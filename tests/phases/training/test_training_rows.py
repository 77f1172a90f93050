"""The rows that every training phase has, made to say each thing that they can say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.contract import proof_text
from runbook.records import LaunchStatus, Outcome, Reason
from runbook.records.evidence import LaunchEvidence
from tests.phases import answers, builder, spoil
from tests.phases.answers import (
    CRASHED,
    DAMAGED,
    IMPOSSIBLE,
    NO_EFFECT,
    NOT_FINITE,
    NOTHING,
    OTHERWISE,
    WRONG,
    says,
)
from tests.phases.spoil import Change
from tests.tiers import examples

FAIL, INVALID, INCOMPLETE, PASS = (
    Outcome.FAIL,
    Outcome.INVALID,
    Outcome.INCOMPLETE,
    Outcome.PASS,
)


def loss(values: Any) -> Change:
    return spoil.columns(loss=values)


def at(column: str, index: int, value: float) -> Change:
    def changed(table: Any) -> Any:
        kept = table[column].astype(float).copy()
        kept.iloc[index] = value
        return kept

    return spoil.columns(**{column: changed})


def damaged(made: LaunchEvidence) -> LaunchEvidence:
    log = replace(made.training, damaged=True, problems=("two headers",))
    return replace(made, training=log)


def silent(made: LaunchEvidence) -> LaunchEvidence:
    return replace(made, ranks=made.ranks[:1])


def stopped(made: LaunchEvidence) -> LaunchEvidence:
    return silent(spoil.ended(LaunchStatus.INTERRUPTED, rows=0)(made))


did_nothing, RANGES = spoil.without_effect, "NSA_SEL_RANGES_V2"
NOT_JSON = "baseline/run1/env.json is not JSON"
AT_STEP_7 = {"step": 7, "value": "nan"}
INTERRUPTED = (INCOMPLETE, Reason.INTERRUPTED)

TRAINED = [
    name
    for name, phase in builder.PHASES.items()
    if any(spec.name == "flaky_launches" for spec in phase.limits)
]

Expected = tuple[Outcome, Reason]
SHARED: dict[str, tuple[str, Change, Expected]] = {
    # the config that the runbook names, not a friendlier one
    "short sequences": ("as_planned", spoil.effective(seq_len=128), OTHERWISE),
    "batch 1": ("as_planned", spoil.effective(global_batch=1), OTHERWISE),
    "no accumulation": ("as_planned", spoil.effective(accumulation=1), OTHERWISE),
    "fp32": ("as_planned", spoil.effective(dtype="fp32"), OTHERWISE),
    "one rank": ("as_planned", spoil.env(world_size=1), OTHERWISE),
    "on the CPU": ("as_planned", spoil.env(device={"type": "cpu"}), OTHERWISE),
    "toggles lost": ("as_planned", spoil.env(toggles=[]), OTHERWISE),
    "other launch": ("as_planned", spoil.env(run_token="x"), OTHERWISE),
    "no env.json": ("as_planned", spoil.parts(env=None), NOTHING),
    "broken env.json": ("as_planned", spoil.parts(env=None, problems=(NOT_JSON,)), DAMAGED),
    "NaN": ("loss_finite", at("loss", 20, math.nan), NOT_FINITE),
    "Inf": ("loss_finite", at("loss", -1, math.inf), NOT_FINITE),
    "NaN told by a rank": ("loss_finite", spoil.rank(1, nonfinite=AT_STEP_7), NOT_FINITE),
    "no CSV": ("loss_finite", spoil.parts(training=None), NOTHING),
    "damaged CSV": ("loss_finite", damaged, DAMAGED),
    "sees the future": ("plausible", loss(2.9), IMPOSSIBLE),
    "tokens missing": ("plausible", at("tokens", 3, 1.0), IMPOSSIBLE),
    "no time": ("plausible", at("dt_s", 9, 0.0), IMPOSSIBLE),
    "rows lost": ("plausible", spoil.ended(LaunchStatus.COMPLETED, rows=40), IMPOSSIBLE),
    "longer than its launch": ("plausible", spoil.result(duration_s=1.0), IMPOSSIBLE),
    "no heartbeats": ("ranks_alive", spoil.parts(ranks=()), NOTHING),
    "rank 1 never spoke": ("ranks_alive", silent, CRASHED),
    "rank 1 ended well, its file is lost": ("ranks_alive", spoil.without_rank_1, NOTHING),
    "stopped by us before rank 1 spoke": ("ranks_alive", stopped, INTERRUPTED),
    "rank behind": ("ranks_alive", spoil.rank(1, last_step=40), OTHERWISE),
    "parameters differ": ("ranks_alive", spoil.rank(1, param_hash="dead"), WRONG),
    "no digest": ("ranks_alive", spoil.every_rank(param_hash=None), NOTHING),
    "strangers": ("ranks_alive", spoil.rank(1, tokens=frozenset({"ff"})), DAMAGED),
    "damaged": ("ranks_alive", spoil.rank(0, damaged=True), DAMAGED),
    "prefill did nothing": ("toggles_effective", did_nothing("NSA_PREFILL_BATCHED"), NO_EFFECT),
    "nobody can tell": ("toggles_effective", did_nothing(RANGES, took=None), NO_EFFECT),
    "no report": ("toggles_effective", spoil.every_rank(effects=()), NO_EFFECT),
}


@pytest.mark.parametrize("phase", ["baseline", "long_run"])
@pytest.mark.parametrize("name", SHARED)
def test_a_spoiled_launch_says_so(phase: str, name: str) -> None:
    what, change, expected = SHARED[name]
    healthy = builder.healthy_checks(phase, answers.WHERE.profile.name)
    assert healthy[f"{phase}.{what}"].outcome is PASS
    check = answers.row(phase, what, change)
    assert answers.said(check) == expected, check.reason


def test_one_bad_launch_of_three_decides_the_row() -> None:
    check = answers.row("baseline", "loss_finite", at("loss", 5, math.nan), only=["run2"])
    assert check.outcome is FAIL
    assert check.reason == "run2: the loss is not finite at step 6"
    assert check.evidence == ("baseline/run2/training.csv",)


def test_a_shorter_retry_may_have_fewer_rows() -> None:

    def retried(made: LaunchEvidence) -> LaunchEvidence:
        short = spoil.ended(LaunchStatus.COMPLETED, rows=50)(made)
        return spoil.result(attempts=2, steps=50)(short)

    assert answers.row("nvtx", "plausible", retried).outcome is PASS


def test_a_gradient_norm_that_is_not_finite_is_called_one() -> None:
    where = builder.context()
    norm, told = at("grad_norm", 6, math.nan), spoil.rank(1, nonfinite={"step": 7, "value": "nan"})
    found = builder.evidence("baseline", where, change=lambda made: told(norm(made)))
    check = says(builder.row("baseline", "loss_finite", found, where), (FAIL, Reason.NON_FINITE))
    assert check.reason == "run1: the gradient norm is not finite at step 7"
    assert (check.measurement.name, str(check.measurement.window)) == ("grad_norm", "steps 7-7")
    assert "the loss is not finite" in answers.row("baseline", "loss_finite", told, where).reason


def test_remedies_come_from_the_playbook() -> None:
    where = builder.context()
    check = answers.row("baseline", "completed", spoil.ended(LaunchStatus.HUNG), where)
    assert "runbook stacks" in check.remedy and "NCCL_DEBUG=INFO" in check.remedy
    assert check.rerun == "runbook run --phase baseline --profile a100x2_pcie4"


GARBAGE = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e30])
COLUMNS = ("loss", "toks_per_s", "tokens", "dt_s", "mem_mib", "fetch_s")


@examples(40)
@given(
    phase=st.sampled_from(["baseline", "bucket_sweep", "fused_adamw", "single_gpu", "long_run"]),
    column=st.sampled_from(COLUMNS),
    value=GARBAGE,
    share=st.sampled_from([0.01, 1.0]),
    keep=st.integers(1, 400),
)
def test_no_number_in_a_csv_can_stop_a_judgement(
    phase: str, column: str, value: float, share: float, keep: int
) -> None:
    def spoil(made: LaunchEvidence) -> LaunchEvidence:
        table = made.training.frame.iloc[:keep].copy()
        table[column] = table[column].astype(float)
        table.iloc[: max(1, int(share * len(table))), table.columns.get_loc(column)] = value
        return replace(made, training=replace(made.training, frame=table))

    where = builder.context("cpu")
    found = builder.evidence(phase, where, change=spoil)
    judgement = builder.judge(phase, found, where)
    if keep < 60 and phase in ("baseline", "single_gpu"):
        checks = {check.id: check for check in judgement.checks}
        assert checks[f"{phase}.plausible"].outcome is not Outcome.PASS


@pytest.mark.parametrize("phase", ["baseline", "bucket_sweep", "single_gpu", "long_run"])
def test_devices_that_would_idle_are_not_plausible_where_a_peak_is_known(phase: str) -> None:
    """5e8 FLOPs per token, 312 TFLOP/s a card: 1 % are 6,240 tok/s on each."""
    ranks = 1 if phase == "single_gpu" else 2
    where = builder.context()
    for rate, outcome in ((6_100.0 * ranks, INVALID), (6_400.0 * ranks, PASS)):
        found = builder.evidence(phase, where, rate=rate)
        check = builder.row(phase, "plausible", found, where)
        assert check.outcome is outcome, check.reason
    cpu = builder.context("cpu")
    assert answers.row(phase, "plausible", where=cpu, rate=5.0).outcome is PASS


# It hung, and finished at the second attempt.
flaky = spoil.result(
    attempts=2, cause="attempt 1: hang: rank 1 waits for rank 0", evidence=("stacks.txt",)
)


@pytest.mark.parametrize("phase", TRAINED)
@pytest.mark.parametrize(
    ("profile", "outcome"),
    [
        ("a100x2_pcie4", Outcome.INCONCLUSIVE),
        ("h200x1", Outcome.INCONCLUSIVE),
        ("cpu", PASS),
    ],
)
def test_a_second_attempt_is_told_and_limited(phase: str, profile: str, outcome: Outcome) -> None:
    where = builder.context(profile)
    plan = builder.PHASES[phase].plan(where)
    # What is said of a commit's launches is about HEAD, and about those that ran.
    ours = [one for one in plan if not one.conditional and not one.name.endswith("reference")]
    last = ours[-1].name
    check = answers.row(phase, "completed", flaky, where, only=[last])
    assert check.outcome is outcome
    assert check.code is (Reason.WARNING if outcome is PASS else Reason.FLAKY)
    assert f"FLAKY: {last} finished only at a second attempt" in check.reason
    assert "hang: rank 1 waits for rank 0" in check.reason
    assert check.remedy and "stacks.txt" in check.evidence


def test_every_training_phase_limits_second_attempts() -> None:
    every = [
        n for n, p in builder.PHASES.items() if f"{n}.ranks_alive" in p.check_ids(builder.context())
    ]
    assert sorted(TRAINED) == sorted({*every, "fineweb"})


def test_more_second_attempts_than_allowed_are_no_pass_on_a_cpu_either() -> None:
    where = builder.context("cpu")
    check = answers.row("baseline", "completed", flaky, where, only=["run1", "run3"])
    assert (check.outcome, check.code) == (Outcome.INCONCLUSIVE, Reason.FLAKY)
    assert check.evidence == ("stacks.txt",), "of any launch, not of the last one only"


def test_a_second_attempt_beside_a_failure_hides_nothing() -> None:
    where = builder.context("cpu")
    found = builder.evidence("baseline", where, change=flaky, only=["run1"])
    crashed = spoil.ended(LaunchStatus.CRASHED)(found.launches["run2"])
    both = replace(found, launches={**found.launches, "run2": crashed})
    assert builder.row("baseline", "completed", both, where).outcome is FAIL


def test_another_workload_than_the_profiles_is_answered_with_both_ways_out() -> None:
    said = answers.row("baseline", "as_planned", spoil.effective(global_batch=8)).remedy
    assert "take the setting back" in said and "a profile of your own" in said
    both = answers.row(
        "baseline",
        "as_planned",
        lambda made: spoil.env(world_size=1)(spoil.effective(seq_len=8)(made)),
    )
    assert "a profile of your own" not in both.remedy


@pytest.mark.parametrize(
    ("evidence", "text"),
    [
        ({"hook": None}, "hook None"),
        ({"hook": "bf16", "bytes_after": 12}, "hook bf16, bytes_after 12"),
        ({"fused": [True, False], "step_device": ["cpu"]}, "fused yes/no, step_device cpu"),
        ({"ranges": []}, "ranges none"),
        ("the profiler saw it", "the profiler saw it"),
    ],
)
def test_a_trainers_evidence_is_words_and_no_notation_of_a_language(
    evidence: Any, text: str
) -> None:
    assert proof_text(evidence) == text
    assert not set("{}[]'") & set(proof_text(evidence))
