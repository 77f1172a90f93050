"""The rows that every training phase has, made to say each thing that they can say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runbook.records import LaunchStatus, Outcome, Reason
from runbook.records.evidence import LaunchEvidence
from tests.phases import answers, builder, spoil, traces
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


def other_git(made: LaunchEvidence) -> LaunchEvidence:
    found = dict(made.env or {})
    return replace(made, env={**found, "git": {**found["git"], "sha": "2" * 40}})


def env_entry(**values: Any) -> Change:
    return lambda made: replace(made, env={**(made.env or {}), **values})


def damaged(made: LaunchEvidence) -> LaunchEvidence:
    assert made.training is not None
    log = replace(made.training, damaged=True, problems=("two headers",))
    return replace(made, training=log)


rows_lost = spoil.ended(LaunchStatus.COMPLETED, rows=40)

TRAINED = [
    name
    for name, phase in builder.PHASES.items()
    if any(spec.name == "flaky_launches" for spec in phase.limits)
]

SHARED: list[tuple[str, str, Change, Outcome, Reason]] = [
    # as_planned: the config that the runbook names, not a friendlier one
    ("short sequences", "as_planned", spoil.effective(seq_len=128), INVALID, Reason.MISMATCH),
    ("batch 1", "as_planned", spoil.effective(global_batch=1), INVALID, Reason.MISMATCH),
    ("no accumulation", "as_planned", spoil.effective(accumulation=1), INVALID, Reason.MISMATCH),
    ("fp32", "as_planned", spoil.effective(dtype="fp32"), INVALID, Reason.MISMATCH),
    ("one rank", "as_planned", env_entry(world_size=1), INVALID, Reason.MISMATCH),
    ("on the CPU", "as_planned", env_entry(device={"type": "cpu"}), INVALID, Reason.MISMATCH),
    ("toggles lost", "as_planned", env_entry(toggles=[]), INVALID, Reason.MISMATCH),
    ("other launch", "as_planned", env_entry(run_token="x"), INVALID, Reason.MISMATCH),
    ("no env.json", "as_planned", spoil.parts(env=None), INCOMPLETE, Reason.MISSING_ARTIFACT),
    (
        "broken env.json",
        "as_planned",
        spoil.parts(env=None, problems=("baseline/run1/env.json is not JSON",)),
        INVALID,
        Reason.DAMAGED_ARTIFACT,
    ),
    # loss_finite
    ("NaN", "loss_finite", at("loss", 20, math.nan), FAIL, Reason.NON_FINITE),
    ("Inf", "loss_finite", at("loss", -1, math.inf), FAIL, Reason.NON_FINITE),
    (
        "NaN told by a rank",
        "loss_finite",
        spoil.rank(1, nonfinite={"step": 7, "value": "nan"}),
        FAIL,
        Reason.NON_FINITE,
    ),
    ("no CSV", "loss_finite", spoil.parts(training=None), INCOMPLETE, Reason.MISSING_ARTIFACT),
    ("damaged CSV", "loss_finite", damaged, INVALID, Reason.DAMAGED_ARTIFACT),
    # plausible
    ("sees the future", "plausible", loss(2.9), INVALID, Reason.NOT_PLAUSIBLE),
    ("starts trained", "plausible", at("loss", 0, 3.0), INVALID, Reason.NOT_PLAUSIBLE),
    ("starts too high", "plausible", at("loss", 0, 9.0), INVALID, Reason.NOT_PLAUSIBLE),
    ("tokens missing", "plausible", at("tokens", 3, 1.0), INVALID, Reason.NOT_PLAUSIBLE),
    (
        "tokens of one rank only",
        "plausible",
        spoil.effective(tokens_per_step=4096),
        INVALID,
        Reason.NOT_PLAUSIBLE,
    ),
    ("rate made up", "plausible", at("toks_per_s", 9, 1e9), INVALID, Reason.NOT_PLAUSIBLE),
    ("no time", "plausible", at("dt_s", 9, 0.0), INVALID, Reason.NOT_PLAUSIBLE),
    ("rows lost", "plausible", rows_lost, INVALID, Reason.NOT_PLAUSIBLE),
    # ranks_alive
    ("no heartbeats", "ranks_alive", spoil.parts(ranks=()), INCOMPLETE, Reason.MISSING_ARTIFACT),
    (
        "rank 1 never spoke",
        "ranks_alive",
        lambda made: replace(made, ranks=made.ranks[:1]),
        FAIL,
        Reason.CRASH,
    ),
    (
        "rank 1 ended well and its file is lost",
        "ranks_alive",
        spoil.without_rank_1,
        INCOMPLETE,
        Reason.MISSING_ARTIFACT,
    ),
    (
        "stopped by us before rank 1 spoke",
        "ranks_alive",
        lambda made: replace(
            spoil.ended(LaunchStatus.INTERRUPTED, rows=0)(made), ranks=made.ranks[:1]
        ),
        INCOMPLETE,
        Reason.INTERRUPTED,
    ),
    ("rank behind", "ranks_alive", spoil.rank(1, last_step=40), INVALID, Reason.MISMATCH),
    ("parameters differ", "ranks_alive", spoil.rank(1, param_hash="dead"), FAIL, Reason.MISMATCH),
    (
        "no digest",
        "ranks_alive",
        spoil.every_rank(param_hash=None),
        INCOMPLETE,
        Reason.MISSING_ARTIFACT,
    ),
    (
        "strangers",
        "ranks_alive",
        spoil.rank(1, tokens=frozenset({"ff"})),
        INVALID,
        Reason.DAMAGED_ARTIFACT,
    ),
    ("damaged", "ranks_alive", spoil.rank(0, damaged=True), INVALID, Reason.DAMAGED_ARTIFACT),
    # toggles_effective
    (
        "prefill did nothing",
        "toggles_effective",
        spoil.without_effect("NSA_PREFILL_BATCHED"),
        INVALID,
        Reason.NO_EFFECT,
    ),
    (
        "nobody can tell",
        "toggles_effective",
        spoil.without_effect("NSA_SEL_RANGES_V2", took=None),
        INVALID,
        Reason.NO_EFFECT,
    ),
    ("no report", "toggles_effective", spoil.every_rank(effects=()), INVALID, Reason.NO_EFFECT),
]


@pytest.mark.parametrize("phase", ["baseline", "long_run"])
@pytest.mark.parametrize(
    ("what", "change", "outcome", "code"),
    [entry[1:] for entry in SHARED],
    ids=[e[0] for e in SHARED],
)
def test_a_spoiled_launch_says_so(
    phase: str, what: str, change: Change, outcome: Outcome, code: Reason
) -> None:
    where = builder.context()
    assert builder.healthy_checks(phase, where.profile.name)[f"{phase}.{what}"].outcome is PASS
    check = builder.row(phase, what, builder.evidence(phase, where, change=change), where)
    assert (check.outcome, check.code) == (outcome, code), check.reason


def test_one_bad_launch_of_three_decides_the_row() -> None:
    where = builder.context()
    found = builder.evidence("baseline", where, change=at("loss", 5, math.nan), only=["run2"])
    check = builder.row("baseline", "loss_finite", found, where)
    assert check.outcome is FAIL
    assert check.reason == "run2: the loss is not finite at step 6"
    assert check.evidence == ("baseline/run2/training.csv",)


def test_a_crash_after_a_nan_is_both() -> None:
    where = builder.context()

    def change(made: LaunchEvidence) -> LaunchEvidence:
        return spoil.ended(LaunchStatus.NON_FINITE)(at("loss", 50, math.nan)(made))

    found = builder.evidence("baseline", where, change=change)
    assert builder.row("baseline", "completed", found, where).code is Reason.NON_FINITE
    assert builder.row("baseline", "loss_finite", found, where).code is Reason.NON_FINITE


def test_sampling_noise_around_the_floor_is_no_leak_of_the_future() -> None:
    where = builder.context()
    steps = builder.PHASES["baseline"].plan(where)[0].steps
    noise = np.random.default_rng(3).normal(0.0, 0.05, steps)
    found = builder.evidence("baseline", where, change=loss(traces.FLOOR + noise))
    assert builder.row("baseline", "plausible", found, where).outcome is PASS


def test_a_source_without_a_known_floor_is_held_against_the_start_only() -> None:
    where = builder.context()

    def falling(made: LaunchEvidence) -> LaunchEvidence:
        return loss(np.linspace(5.5, 2.0, made.launch.steps))(
            spoil.effective(loss_floor=None)(made)
        )

    found = builder.evidence("baseline", where, change=falling)
    assert builder.row("baseline", "plausible", found, where).outcome is PASS


def test_steps_cannot_take_longer_than_their_launch() -> None:
    where = builder.context()

    def hasty(made: LaunchEvidence) -> LaunchEvidence:
        return replace(made, result=made.result.model_copy(update={"duration_s": 1.0}))

    found = builder.evidence("baseline", where, change=hasty)
    check = builder.row("baseline", "plausible", found, where)
    assert check.code is Reason.NOT_PLAUSIBLE and "in a launch of 1.0 s" in check.reason


def test_a_shorter_retry_may_have_fewer_rows() -> None:
    where = builder.context()

    def retried(made: LaunchEvidence) -> LaunchEvidence:
        short = spoil.ended(LaunchStatus.COMPLETED, rows=50)(made)
        update = {"attempts": 2, "steps": 50}
        return replace(short, result=short.result.model_copy(update=update))

    found = builder.evidence("nvtx", where, change=retried)
    assert builder.row("nvtx", "plausible", found, where).outcome is PASS


def test_a_gradient_norm_that_is_not_finite_is_called_one() -> None:
    where = builder.context()
    norm, told = at("grad_norm", 6, math.nan), spoil.rank(1, nonfinite={"step": 7, "value": "nan"})
    found = builder.evidence("baseline", where, change=lambda made: told(norm(made)))
    check = builder.row("baseline", "loss_finite", found, where)
    assert (check.outcome, check.code) == (FAIL, Reason.NON_FINITE)
    assert check.reason == "run1: the gradient norm is not finite at step 7"
    assert check.measurement is not None
    assert (check.measurement.name, str(check.measurement.window)) == ("grad_norm", "steps 7-7")
    found = builder.evidence("baseline", where, change=told)
    assert "the loss is not finite" in builder.row("baseline", "loss_finite", found, where).reason


def test_remedies_come_from_the_playbook() -> None:
    where = builder.context()
    found = builder.evidence("baseline", where, change=spoil.ended(LaunchStatus.HUNG))
    check = builder.row("baseline", "completed", found, where)
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
        assert made.training is not None
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
    found = builder.evidence(phase, cpu, rate=5.0)
    assert builder.row(phase, "plausible", found, cpu).outcome is PASS


def test_a_floor_that_is_missed_stays_a_fail_although_the_devices_idle() -> None:
    where = builder.context()
    found = builder.evidence("baseline", where, rate=23.0)
    assert builder.row("baseline", "throughput", found, where).outcome is FAIL


def flaky(made: LaunchEvidence) -> LaunchEvidence:
    """It hung, and finished at the second attempt."""
    cause = "attempt 1: hang: rank 1 waits for rank 0"
    update = {"attempts": 2, "cause": cause, "evidence": ("stacks.txt",)}
    return replace(made, result=made.result.model_copy(update=update))


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
    found = builder.evidence(phase, where, change=flaky, only=[last])
    check = builder.row(phase, "completed", found, where)
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


def test_the_second_attempt_of_any_launch_is_in_evidence() -> None:
    where = builder.context("cpu")
    found = builder.evidence("baseline", where, change=flaky, only=["run1"])
    assert builder.row("baseline", "completed", found, where).evidence == ("stacks.txt",)


def test_more_second_attempts_than_allowed_are_no_pass_on_a_cpu_either() -> None:
    where = builder.context("cpu")
    found = builder.evidence("baseline", where, change=flaky, only=["run1", "run3"])
    check = builder.row("baseline", "completed", found, where)
    assert (check.outcome, check.code) == (Outcome.INCONCLUSIVE, Reason.FLAKY)


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
        lambda made: env_entry(world_size=1)(spoil.effective(seq_len=8)(made)),
    )
    assert "a profile of your own" not in both.remedy
