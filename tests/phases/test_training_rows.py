"""The rows that every training phase has, made to say each thing that they can say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.contract import proof_text
from phases.training.plausible import differences
from runbook.records import LaunchStatus, Outcome, Reason
from runbook.records.evidence import LaunchEvidence
from tests.phases import answers, builder, env_files, heartbeats, spoil
from tests.phases.answers import (
    CRASHED,
    DAMAGED,
    FINE,
    IMPOSSIBLE,
    NO_EFFECT,
    NOT_FINITE,
    NOTHING,
    OTHERWISE,
    UNLIKE,
    WHERE,
    WRONG,
    case,
    says,
)
from tests.phases.spoil import Change, at
from tests.tiers import examples

CPU = builder.context("cpu")
START = math.log(256)
INTERRUPTED = (Outcome.INCOMPLETE, Reason.INTERRUPTED)
FLAKY = (Outcome.INCONCLUSIVE, Reason.FLAKY)
TRAINED = [
    name
    for name, phase in builder.PHASES.items()
    if any(spec.name == "flaky_launches" for spec in phase.limits)
]


def cell(column: str, index: int, value: float) -> Change:
    """One value of a column of training.csv."""

    def changed(table: Any) -> Any:
        kept = table[column].astype(float).copy()
        kept.iloc[index] = value
        return kept

    return spoil.columns(**{column: changed})


silent = at("ranks", lambda ranks: ranks[:1])
stopped = spoil.both(silent, spoil.ended(LaunchStatus.INTERRUPTED, rows=0))
RANGES = "NSA_SEL_RANGES_V2"
NOT_JSON = spoil.parts(env=None, problems=("baseline/run1/env.json is not JSON",))
AT_STEP_7 = {"step": 7, "value": "nan"}
# Step 20 missing, and one more at the end: as many rows as were planned.
OTHER_STEP = spoil.columns(step=lambda table: table["step"] + (table["step"] >= 20))


def losses(*first: float, last: float = 5.0) -> Change:
    return spoil.columns(loss=lambda t: [*first, *[last] * (len(t) - len(first))])


def below_its_floor(below: float) -> Change:
    """The mean of the last 50 steps lies so far below the floor of the data."""
    noise = np.random.default_rng(3).normal(0.0, 0.001, 50)

    def change(made: LaunchEvidence) -> LaunchEvidence:
        low = made.env["effective"]["loss_floor"] - below + noise
        return spoil.columns(loss=lambda table: [*table["loss"][:-50], *low])(made)

    return change


def steps(which: Callable[[Any], Any]) -> Change:
    return spoil.columns(step=lambda table: which(table["step"]))


SHARED: dict[str, tuple[str, Change, tuple[Outcome, Reason], str]] = {
    # The config that the runbook names, not a friendlier one.
    "short sequences": ("as_planned", spoil.effective(seq_len=128), OTHERWISE, "seq_len"),
    "batch 1": ("as_planned", spoil.effective(global_batch=1), OTHERWISE, "global_batch"),
    "no accumulation": ("as_planned", spoil.effective(accumulation=1), OTHERWISE, "accumulation"),
    "fp32": ("as_planned", spoil.effective(dtype="fp32"), OTHERWISE, "dtype"),
    "one rank": ("as_planned", spoil.env(world_size=1), OTHERWISE, ""),
    "on the CPU": ("as_planned", spoil.env(device={"type": "cpu"}), OTHERWISE, ""),
    "toggles lost": ("as_planned", spoil.env(toggles=[]), OTHERWISE, ""),
    "other launch": ("as_planned", spoil.env(run_token="x"), OTHERWISE, ""),
    "no env.json": ("as_planned", spoil.parts(env=None), NOTHING, "env.json"),
    "broken env.json": ("as_planned", NOT_JSON, DAMAGED, "is not JSON"),
    "NaN": ("loss_finite", cell("loss", 20, math.nan), NOT_FINITE, "at step 21"),
    "Inf": ("loss_finite", cell("loss", -1, math.inf), NOT_FINITE, ""),
    "NaN told by a rank": ("loss_finite", spoil.rank(1, nonfinite=AT_STEP_7), NOT_FINITE,
                           "the loss is not finite"),
    "no CSV": ("loss_finite", spoil.parts(training=None), NOTHING, "training.csv"),
    "damaged CSV": ("loss_finite", at("training", damaged=True, problems=("two headers",)),
                    DAMAGED, "two headers"),
    "no heartbeats": ("ranks_alive", spoil.parts(ranks=()), NOTHING, ""),
    "rank 1 never spoke": ("ranks_alive", silent, CRASHED, ""),
    "rank 1 ended well, its file is lost": ("ranks_alive", spoil.without_rank_1, NOTHING, ""),
    "stopped by us before rank 1 spoke": ("ranks_alive", stopped, INTERRUPTED, ""),
    "rank behind": ("ranks_alive", spoil.rank(1, last_step=40), OTHERWISE, ""),
    "parameters differ": ("ranks_alive", spoil.rank(1, param_hash="dead"), WRONG, ""),
    "no digest": ("ranks_alive", spoil.every_rank(param_hash=None), NOTHING, ""),
    "strangers": ("ranks_alive", spoil.rank(1, tokens=frozenset({"ff"})), DAMAGED, ""),
    "damaged": ("ranks_alive", spoil.rank(0, damaged=True), DAMAGED, ""),
    "prefill did nothing": ("toggles_effective", spoil.without_effect("NSA_PREFILL_BATCHED"),
                            NO_EFFECT, "NSA_PREFILL_BATCHED"),
    "nobody can tell": ("toggles_effective", spoil.without_effect(RANGES, took=None), NO_EFFECT,
                        RANGES),
    "no report": ("toggles_effective", spoil.every_rank(effects=()), NO_EFFECT, ""),
    # Numbers that are impossible, at the edge of what is possible.
    "sees the future": ("plausible", spoil.columns(loss=2.9), IMPOSSIBLE, ""),
    "begins at step 2": ("plausible", steps(lambda s: s + 1), IMPOSSIBLE, "row 1 is step 2"),
    "another step": ("plausible", OTHER_STEP, IMPOSSIBLE, "row 20 is step 21"),
    "a step twice": ("plausible", steps(lambda s: s - (s > 2)), IMPOSSIBLE, "row 3 is step 2"),
    "tokens missing": ("plausible", cell("tokens", 3, 8191), IMPOSSIBLE, " tokens in "),
    "no time": ("plausible", cell("dt_s", 9, 0.0), IMPOSSIBLE, ""),
    "rows lost": ("plausible", spoil.ended(LaunchStatus.COMPLETED, rows=40), IMPOSSIBLE,
                  "40 rows for "),
    "longer than its launch": ("plausible", spoil.result(duration_s=1.0), IMPOSSIBLE,
                               "s in a launch of 1.0 s"),
    "another rate": ("plausible", cell("toks_per_s", 2, 83_000.0), IMPOSSIBLE,
                     "toks_per_s is not tokens / dt_s at step 3"),
    "other batches": ("plausible", spoil.effective(accumulation=3), IMPOSSIBLE,
                      "but S x batch x accumulation is"),
    "below nothing": ("plausible", losses(START, -0.001), IMPOSSIBLE,
                      "the loss is -0.001 at step 2, which no cross-entropy can be"),
    "no number": ("plausible", losses(START, math.nan), IMPOSSIBLE, "not finite in every step"),
    "always the same": ("plausible", losses(START, last=START), IMPOSSIBLE, "in each of "),
    "knows too much": ("plausible", losses(1.0, 1.1, last=1.2), IMPOSSIBLE,
                       "first loss 1.000, far from ln(256) = 5.545"),
    "below its floor": ("plausible", below_its_floor(0.2), IMPOSSIBLE,
                        "of the last 50 steps is below the floor"),
    "no vocabulary": ("plausible", spoil.effective(vocab_size=None), IMPOSSIBLE,
                      "env.json has no vocabulary size"),
    "a vocabulary of one": ("plausible", spoil.effective(vocab_size=1), IMPOSSIBLE,
                            "env.json has no vocabulary size"),
}  # fmt: skip


@pytest.mark.parametrize("phase", ["baseline", "long_run"])
@pytest.mark.parametrize("name", SHARED)
def test_a_spoiled_launch_says_so(phase: str, name: str) -> None:
    what, change, expected, words = SHARED[name]
    says(answers.row(phase, what, change, where=builder.context()), expected, words)


ON_TWO_PROFILES = {
    "one file in all launches": ("baseline", at("training", sha256=heartbeats.SHA), "comparable",
                                 "are the same file"),
    "one heartbeat file": ("baseline", spoil.rank(0, sha256=heartbeats.SHA), "comparable",
                           "are the same file"),
    "one reading of the gates": ("long_run", at("gates", lambda table: table[:1]), "gates",
                                 "1 reading(s) of the gates"),
    "no reading in the middle": ("long_run", at("gates", lambda table: pd.concat(
        [table[: len(table) // 4], table[3 * len(table) // 4 :]])), "gates", "no reading of"),
}  # fmt: skip


@pytest.mark.parametrize("profile", ["a100x2_pcie4", "cpu"])
@pytest.mark.parametrize("name", ON_TWO_PROFILES)
def test_an_edit_makes_a_required_row_no_pass(name: str, profile: str) -> None:
    phase, change, what, text = ON_TWO_PROFILES[name]
    check = answers.row(phase, what, change, builder.context(profile))
    assert check.required and check.outcome is not Outcome.PASS
    assert text in check.reason


def retried(made: LaunchEvidence) -> LaunchEvidence:
    short = spoil.ended(LaunchStatus.COMPLETED, rows=50)(made)
    return spoil.result(attempts=2, steps=50)(short)


def _idle(rate: float, wanted: tuple[Outcome, Reason], where: Any = WHERE) -> list[Any]:
    """The same rate on each device, in four phases."""
    return [case(phase, "plausible", None, wanted, where=where, called=f"{phase}-{rate}",
                 rate=rate * (1 if phase == "single_gpu" else 2))
            for phase in ("baseline", "bucket_sweep", "single_gpu", "long_run")]  # fmt: skip


NORM = spoil.both(cell("grad_norm", 6, math.nan), spoil.rank(1, nonfinite=AT_STEP_7))
MASKED = spoil.env(attention=env_files.attention(WHERE.profile.workload, "masked", "varlen"))


@pytest.mark.parametrize("holds", [
    case("nvtx", "plausible", retried, FINE, called="a shorter retry may have fewer rows"),
    # A folder that is judged may not say how long it took; two words are a vocabulary.
    case("baseline", "plausible", spoil.result(duration_s=0.0), FINE, called="no duration"),
    case("baseline", "plausible", below_its_floor(0.0), FINE, called="at its floor"),
    # 5e8 FLOPs per token, 312 TFLOP/s a card: 1 % are 6,240 tok/s on each.
    *_idle(6_100.0, IMPOSSIBLE), *_idle(6_400.0, FINE), *_idle(2.5, FINE, CPU),
    # A gradient norm that is not finite is called one.
    case("baseline", "loss_finite", NORM, NOT_FINITE,
         "run1: the gradient norm is not finite at step 7"),
    case("baseline", "loss_finite", cell("loss", 5, math.nan), NOT_FINITE,
         "run2: the loss is not finite at step 6", evidence="baseline/run2/training.csv",
         only=["run2"]),
    case("baseline", "comparable", MASKED, UNLIKE,
         "attention.window.value: 'varlen' against 'masked'", "run3", only=["run3"]),
    case("single_gpu", "comparable", MASKED, UNLIKE,
         "attention.window.value: 'varlen' against 'masked'", "run3", only=["run3"]),
])  # fmt: skip
def test_what_one_launch_says_of_itself(holds: Callable[[], None]) -> None:
    holds()


def test_a_measurement_of_a_norm_is_of_its_step() -> None:
    check = answers.row("baseline", "loss_finite", NORM)
    assert (check.measurement.name, str(check.measurement.window)) == ("grad_norm", "steps 7-7")


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
        (LEFT, LEFT, (), []),
        (LEFT, RIGHT, (), OTHER),
        (LEFT, RIGHT, ("git.sha", "config.train.lr"), OTHER[2:]),
        (EXACT, {"policies": {**EXACT["policies"], "sdpa_kernels": {"flash": True}}}, (), []),
        (EXACT, {"policies": {**EXACT["policies"], "tf32_matmul": True}}, (),
         ["policies.tf32_matmul: False against True"]),
        (EXACT, {"policies": {**EXACT["policies"], "float32_matmul_precision": "medium"}}, (),
         ["policies.float32_matmul_precision: 'highest' against 'medium'"]),
    ],
)  # fmt: skip
def test_what_makes_two_launches_unlike(left: Any, right: Any, but: Any, found: list[str]) -> None:
    assert differences(left, right, but=but) == found


def test_remedies_come_from_the_playbook() -> None:
    check = answers.row("baseline", "completed", spoil.ended(LaunchStatus.HUNG))
    assert "runbook stacks" in check.remedy and "NCCL_DEBUG=INFO" in check.remedy
    assert check.rerun == "runbook run --phase baseline --profile a100x2_pcie4"


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


# It hung, and finished at the second attempt.
flaky = spoil.result(
    attempts=2, cause="attempt 1: hang: rank 1 waits for rank 0", evidence=("stacks.txt",)
)


@pytest.mark.parametrize("phase", TRAINED)
@pytest.mark.parametrize(
    ("profile", "wanted"),
    [("a100x2_pcie4", FLAKY), ("h200x1", FLAKY), ("cpu", (Outcome.PASS, Reason.WARNING))],
)
def test_a_second_attempt_is_told_and_limited(phase: str, profile: str, wanted: Any) -> None:
    where = builder.context(profile)
    plan = builder.PHASES[phase].plan(where)
    # What is said of a commit's launches is about HEAD, and about those that ran.
    ours = [one for one in plan if not one.conditional and not one.name.endswith("reference")]
    last = ours[-1].name
    check = answers.row(phase, "completed", flaky, where, only=[last])
    says(check, wanted, f"FLAKY: {last} finished only at a second attempt", evidence="stacks.txt")
    assert "hang: rank 1 waits for rank 0" in check.reason and check.remedy


def test_every_training_phase_limits_second_attempts() -> None:
    every = [
        n for n, p in builder.PHASES.items() if f"{n}.ranks_alive" in p.check_ids(builder.context())
    ]
    assert sorted(TRAINED) == sorted({*every, "fineweb"})


def test_more_second_attempts_than_allowed_are_no_pass_on_a_cpu_either() -> None:
    check = says(answers.row("long_run", "completed", flaky, CPU, only=["run", "resumed"]), FLAKY)
    assert check.evidence == ("stacks.txt",), "of any launch, not of the last one only"


def test_a_second_attempt_beside_a_failure_hides_nothing() -> None:
    crashed = spoil.of_launch("stopped", spoil.ended(LaunchStatus.CRASHED))
    both = spoil.both(spoil.of_launch("run", flaky), crashed)
    assert answers.row("long_run", "completed", both, CPU).outcome is Outcome.FAIL


def test_another_workload_than_the_profiles_is_answered_with_both_ways_out() -> None:
    said = answers.row("baseline", "as_planned", spoil.effective(global_batch=8)).remedy
    assert "take the setting back" in said and "a profile of your own" in said
    change = spoil.both(spoil.effective(seq_len=8), spoil.env(world_size=1))
    assert "a profile of your own" not in answers.row("baseline", "as_planned", change).remedy


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
