"""What the A/B phases share: the control, unlike arms, noise, and stopping when it is known."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest

from runbook.config.phase import Judgement
from runbook.records import LaunchStatus, Outcome, Reason, Verdict, judge_run
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from tests.phases import answers, builder, spoil, traces
from tests.phases.answers import (
    FINE,
    IMPOSSIBLE,
    NO_EFFECT,
    NOT_ASKED_FOR,
    UNDECIDED,
    UNLIKE,
    WARNED,
    WHERE,
    get,
    judged,
    noisy,
    said,
    says,
)
from tests.phases.heartbeats import cut_by

PHASES = builder.PHASES
# The row that chooses.
CHOICE = {"bucket_sweep": "bucket_sweep.best", "fused_adamw": "fused_adamw.keep"}
RATES = (1e5, 1.01e5, 0.99e5, 1.01e5, 0.99e5)


def with_baseline(*rates: float) -> dict[str, PhaseEvidence]:
    planned = PHASES["baseline"].plan(WHERE)
    launches = {
        launch.name: traces.healthy(launch, WHERE.profile, rate=rate)
        for launch, rate in zip(planned, rates, strict=False)
    }
    return {"baseline": PhaseEvidence(launches=launches)}


OTHER = spoil.effective(seq_len=128)


@pytest.mark.parametrize(
    ("change", "rate", "before", "expected", "words"),
    [
        (None, 1.0e5, RATES, FINE, ""),
        (None, 1.03e5, RATES, FINE, ""),
        (None, 2.5e5, RATES, UNLIKE, ""),
        (None, 0.5e5, RATES, UNLIKE, ""),
        (OTHER, 1e5, RATES, UNLIKE, "seq_len"),
        # Two baseline launches have an interval, and one has none.
        (None, 1e5, RATES[:2], FINE, ""),
        (None, 1e5, RATES[:1], (Outcome.INCONCLUSIVE, Reason.TOO_FEW_SAMPLES), ""),
        (None, 1e5, None, NOT_ASKED_FOR, ""),
    ],
)
@pytest.mark.parametrize("phase", CHOICE)
def test_the_control_arm_has_to_reproduce_the_baseline(
    phase: str, change: Any, rate: float, before: Any, expected: Any, words: str
) -> None:
    earlier = with_baseline(*before) if before else None
    says(answers.row(phase, "control", change, rate=rate, earlier=earlier), expected, words)


def test_the_control_is_held_against_a_prediction_interval() -> None:
    """Student's t for one more launch: mean ± t s sqrt(1 + 1/n) of the logs, by hand."""
    rates = (1e5, 1.08e5, 0.95e5, 1.02e5, 0.97e5)
    check = answers.row("bucket_sweep", "control", rate=1e5, earlier=with_baseline(*rates))
    logs = [math.log(rate) for rate in rates]
    reach = 4.604095 * statistics.stdev(logs) * math.sqrt(6 / 5)  # t(0.995; 4), printed tables
    low, high = (math.exp(statistics.mean(logs) + side) for side in (-reach, reach))
    assert check.measurement.interval == pytest.approx((low, high), rel=1e-6)


@pytest.mark.parametrize("phase", CHOICE)
def test_arms_of_different_commits_choose_nothing(phase: str) -> None:
    where = builder.context(protocol="launches")
    newer, last = spoil.env(git={"sha": "2" * 40}), PHASES[phase].plan(where)[-1].name
    found = builder.evidence(phase, where, change=newer, only=[last])
    judgement = builder.judge(phase, found, where)
    says(get(judgement, CHOICE[phase]), UNLIKE)
    assert judgement.choices == {}


@pytest.mark.parametrize("phase", CHOICE)
def test_a_run_may_stop_when_the_answer_is_known(phase: str) -> None:
    (launch,) = PHASES[phase].plan(WHERE)
    clear = traces.healthy(launch, WHERE.profile, rates={"25": 2e5, "fused": 2e5})
    log = spoil.jittered(clear.training, 0.01)
    row = len(launch.schedule.rounds[0]) * (launch.schedule.steps + launch.schedule.warmup_steps)
    for rows, enough in ((len(log.frame), True), (2 * row, False), (0, False)):
        cut = replace(log, frame=log.frame.iloc[:rows])
        assert PHASES[phase].enough(cut, launch, WHERE) is enough


@pytest.mark.parametrize("other", [0.8e5, 0.953e5, 1.047e5, 1.25e5])
def test_an_a_a_is_judged_alike_in_both_directions(other: float) -> None:
    """A variant that looked 4.7 % faster than itself was KEEP, one 5.5 % slower INVALID."""
    found = judged("fused_adamw", {"baseline": 1e5, "again": other}, builder.context(aa=True))
    says(get(found, CHOICE["fused_adamw"]), IMPOSSIBLE, "difference between equal arms")


@pytest.mark.parametrize("phase", CHOICE)
@pytest.mark.parametrize("profile", ["a100x2_pcie4", "cpu"])
def test_an_a_a_of_equal_arms_is_a_tie(phase: str, profile: str) -> None:
    check = get(judged(phase, {}, builder.context(profile, aa=True)), CHOICE[phase])
    assert check.outcome is Outcome.PASS and check.reason.startswith("TIE")


def _beside_a_neighbor(made: LaunchEvidence) -> LaunchEvidence:
    """In two of three rounds the second arm is slow, in one of seven the first."""

    def busy(table: Any) -> Any:
        second = table["arm"] != table["arm"].iloc[0]
        taken = (second & (table["block"] % 3 > 0)) | (~second & (table["block"] % 7 == 3))
        return taken.map({True: 1.0, False: 0.7})

    return noisy(spoil.slower(busy)(made))


@pytest.mark.parametrize("aa", [True, False])
@pytest.mark.parametrize("phase", CHOICE)
def test_a_difference_that_a_neighbor_made_decides_nothing(phase: str, aa: bool) -> None:
    where = builder.context(aa=aa)
    arms = list(PHASES[phase].values(where))  # type: ignore[attr-defined]
    rates = {arm: 1e5 * 0.8 ** (index > 1) for index, arm in enumerate(arms)}
    found = builder.evidence(phase, where, rates=rates, change=_beside_a_neighbor)
    judgement = builder.judge(phase, found, where)
    says(get(judgement, CHOICE[phase]), UNDECIDED, "changed its pace")
    assert "1" not in judgement.choices.values()


def test_where_nothing_is_gated_an_undecided_sweep_keeps_the_configured_value() -> None:
    where = builder.context("cpu")
    found = builder.evidence("bucket_sweep", where, change=_beside_a_neighbor, rates={"1": 5e4})
    judgement = builder.judge("bucket_sweep", found, where)
    assert get(judgement, "bucket_sweep.best").outcome is Outcome.PASS
    assert judgement.choices == {"NSA_DDP_BUCKET_MB": "0.5"}


# Bucket sweep: a winner, a tie, and every way in which the arms decide nothing.


@pytest.mark.parametrize(
    ("faster", "word", "words", "chosen"),
    [(1.1e5, "WINNER", "", "50"), (1.0005e5, "TIE", "the configured 25 MB stays", "25")],
)
def test_a_clearly_better_bucket_wins_and_is_chosen(
    faster: float, word: str, words: str, chosen: str
) -> None:
    """Equal ones tie, and the configured one stays whatever the documented rule says."""
    judgement = judged("bucket_sweep", {"25": 1e5, "50": faster, "100": 1e5})
    best = says(get(judgement, "bucket_sweep.best"), FINE, words)
    assert best.reason.startswith(word) and ("stays" in best.reason) is bool(words)
    assert judgement.choices == {"NSA_DDP_BUCKET_MB": chosen}
    assert not words or "by the documented rule alone" in judgement.notes[0]


def test_the_bucket_table_has_a_row_for_each_size_with_the_last_50_steps() -> None:
    judgement = judged("bucket_sweep", {"25": 9e4, "50": 1e5, "100": 8e4}, jitter=False)
    (table,) = judgement.tables
    assert [row[0] for row in table.rows] == ["25", "50", "100"]
    assert [row[1] for row in table.rows] == pytest.approx([9e4, 1e5, 8e4])
    assert all(str(row[3]).startswith("steps ") for row in table.rows)
    assert {row[-1] for row in table.rows} == {"bucket_sweep/interleaved/training.csv"}


def same_sizes(*mib: float) -> spoil.Change:
    """Every arm tells the sizes that the first one has, or these."""
    return spoil.at("ranks.*.ddp_buckets.*.sizes_mib", list(mib))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (same_sizes(50.0, 50.0), "same buckets"),
        (same_sizes(8.0), "one bucket of 8.00 MiB"),
        (spoil.every_rank(ddp_buckets=()), "no bucket sizes logged"),
        (spoil.without_effect("NSA_DDP_BUCKET_MB", arm="25"), "in arm 25: did nothing"),
    ],
)
def test_buckets_that_did_not_differ_decide_nothing(change: spoil.Change, text: str) -> None:
    found = builder.evidence("bucket_sweep", WHERE, change=change, rates={"25": 2e5})
    judgement = builder.judge("bucket_sweep", found, WHERE)
    for what in ("buckets_differ", "best"):
        says(get(judgement, f"bucket_sweep.{what}"), answers.NO_EFFECT, text)
    assert judgement.choices == {}


def _twice(made: LaunchEvidence) -> LaunchEvidence:
    """Every arm's DDP got twice its cap: the largest arm has one bucket of all gradients."""
    sizes = made.launch.schedule.settings
    told = tuple(
        {"arm": arm, "block": 0, **cut_by(2 * float(one["NSA_DDP_BUCKET_MB"]), 150.0)}
        for arm, one in sizes.items()
    )
    return spoil.every_rank(ddp_buckets=told)(made)


GIVEN = "a setting that it was given"


def test_buckets_of_twice_the_cap_fail_and_the_trainer_is_to_blame() -> None:
    check = answers.row("bucket_sweep", "accounts", _twice)
    text = "rank 0 in arm 25: DDP's buckets (50/50/50 MiB) are those of a cap"
    says(check, answers.WRONG, text, remedy=GIVEN)
    silent = spoil.both(_twice, spoil.without_effect("NSA_DDP_BUCKET_MB"))
    differ = answers.row("bucket_sweep", "buckets_differ", silent)
    says(differ, answers.NO_EFFECT, "one bucket of 200.00 MiB", remedy=GIVEN)
    assert "below the size of the model's gradients" not in differ.remedy


def test_an_arm_that_failed_fails_the_sweep() -> None:
    failure = ({"arm": "100", "error": "out of buffers"},)
    check = answers.row("bucket_sweep", "arms_complete", spoil.rank(0, arm_failures=failure))
    says(check, answers.CRASHED, "out of buffers")


def test_one_launch_per_arm_and_round_is_judged_alike() -> None:
    where = builder.context(protocol="launches")
    launches = {}
    for number, launch in enumerate(PHASES["bucket_sweep"].plan(where)):
        rate = (1.2e5 if launch.name.startswith("25_") else 1e5) * (1 + 0.002 * (number % 4))
        launches[launch.name] = traces.healthy(launch, where.profile, rate=rate)
    judgement = builder.judge("bucket_sweep", PhaseEvidence(launches=launches), where)
    assert get(judgement, "bucket_sweep.best").reason.startswith("WINNER")
    assert judgement.choices == {"NSA_DDP_BUCKET_MB": "25"}
    assert len(judgement.tables[0].rows) == 12


def test_the_single_protocol_gives_a_table_and_no_decision() -> None:
    where = builder.context(protocol="single")
    judgement = builder.judge("bucket_sweep", builder.evidence("bucket_sweep", where), where)
    assert get(judgement, "bucket_sweep.best").outcome is Outcome.INCONCLUSIVE
    assert [row[3] for row in judgement.tables[0].rows] == ["steps 151-200"] * 3


# Fused AdamW: kept, dropped or undecided, and whose fault an ended launch is.

CPU = builder.context("cpu")


def fused(change: spoil.Change | None = None, where: Any = WHERE, **options: Any) -> Judgement:
    found = builder.evidence("fused_adamw", where, change=change, **options)
    return builder.judge("fused_adamw", found, where)


def row(judgement: Judgement, what: str) -> Any:
    return get(judgement, f"fused_adamw.{what}")


def refused(made: LaunchEvidence) -> LaunchEvidence:
    """The fused arm could not run, and the others went on."""
    failure = ({"arm": "fused", "error": "fused=True needs CUDA"},)
    table = made.training.frame[made.training.frame["arm"] != "fused"]
    table = table.assign(step=range(1, len(table) + 1))
    spoken = spoil.every_rank(arm_failures=failure, last_step=len(table))(made)
    return spoil.at("training.frame", table)(spoken)


def ended(status: LaunchStatus, rows: int = 34) -> spoil.Change:
    """By default after 24 rows of the control and 10 of the fused arm."""
    return spoil.ended(status, rows=rows)


WORSE = spoil.columns(loss=lambda table: table["loss"] + 0.3 * (table["arm"] == "fused"))
FASTER, SLOWER, NEAR = ({"rates": {"fused": rate}} for rate in (1.05e5, 0.9e5, 0.98e5))
BY_HALVES = {"where": builder.context(protocol="launches")}
FUSED_HUNG = {**BY_HALVES, "only": ["fused_r1"]}
CONTROL_HUNG = {**BY_HALVES, "only": ["baseline_r1"]}
DROPPED, NONE = (WARNED, "WARNING: DROP"), (Outcome.INCOMPLETE, "")
HANG, TIMEOUT = (Outcome.FAIL, Reason.HANG), (Outcome.INCOMPLETE, Reason.TIMEOUT)
SLOW_SAID = "not gated on profile cpu, nothing was decided: "


@pytest.mark.parametrize(("change", "options", "rows"), [
    (None, FASTER, {"keep": (FINE, "KEEP")}),
    (None, SLOWER, {"keep": (FINE, "DROP")}),
    (spoil.jitter(0.25), NEAR, {"keep": (UNDECIDED, "")}),
    # On a CPU an undecided speed leaves the toggle unset and passes.
    (spoil.jitter(0.3), {"where": CPU}, {"keep": ((Outcome.PASS, Reason.NOT_GATED), SLOW_SAID)}),
    (WORSE, {}, {"keep": DROPPED, "loss_parity": (WARNED, "")}),
    *((ended(status), {}, {"completed": (WARNED, ""), "keep": DROPPED}) for status in
      (LaunchStatus.HUNG, LaunchStatus.CRASHED, LaunchStatus.NON_FINITE)),
    (refused, {}, {"completed": (FINE, ""), "plausible": (FINE, ""), "keep": DROPPED}),
    # An end that is not the fused arm's leaves nothing to keep, nor what we cut off ourselves.
    (ended(LaunchStatus.HUNG, 10), {}, {"completed": (HANG, ""), "keep": NONE}),
    (ended(LaunchStatus.TIMED_OUT), {}, {"completed": (TIMEOUT, ""), "keep": NONE}),
    (ended(LaunchStatus.HUNG, 20), FUSED_HUNG, {"completed": (WARNED, ""), "keep": DROPPED}),
    (ended(LaunchStatus.HUNG, 20), CONTROL_HUNG, {"completed": (HANG, "")}),
    # An A/B of identical code is invalid.
    *((spoil.without_effect("NSA_OPT_FUSED", arm=arm), {"rates": {"fused": 2e5}},
       {"took_effect": (NO_EFFECT, ""), "keep": (NO_EFFECT, "")}) for arm in ("baseline", "fused")),
])  # fmt: skip
def test_fused_is_kept_unless_it_is_slower_and_stays_unset_near_the_margin(
    change: spoil.Change | None, options: dict[str, Any], rows: dict[str, Any]
) -> None:
    judgement = fused(change, **options)
    for what, (wanted, begins) in rows.items():
        check = row(judgement, what)
        assert wanted in (said(check), check.outcome), check.reason
        assert check.reason.startswith(begins)
    kept = rows.get("keep", ("", ""))[1] == "KEEP"
    assert judgement.choices == ({"NSA_OPT_FUSED": "1"} if kept else {})


def test_the_table_has_the_two_arms() -> None:
    (table,) = fused(**SLOWER).tables
    assert [one[0] for one in table.rows] == ["baseline", "fused"]
    assert [one[1] for one in table.rows] == pytest.approx([1e5, 0.9e5])


def test_fused_that_ends_the_launch_leaves_a_phase_that_passes() -> None:
    outcomes = {check.outcome for check in fused(ended(LaunchStatus.CRASHED)).checks}
    assert outcomes == {Outcome.PASS, Outcome.SKIPPED}
    assert "fused=True needs CUDA" in row(fused(refused), "keep").reason


def test_what_is_not_decided_on_a_cpu_says_so() -> None:
    reason = row(fused(spoil.jitter(0.3), CPU), "keep").reason
    assert "INCONCLUSIVE" not in reason and "NSA_OPT_FUSED stays as it is" in reason


def test_the_safe_mode_leaves_nothing_to_compare_and_never_a_go() -> None:
    judgement = fused(where=replace(WHERE, toggles={"NSA_DDP_SAFE_MODE": "1"}))
    assert {said(check) for check in judgement.checks} == {(Outcome.SKIPPED, Reason.NOT_COMPARABLE)}
    keep = row(judgement, "keep")
    assert keep.required and "NSA_DDP_SAFE_MODE=1 forbids NSA_OPT_FUSED=1" in keep.reason
    assert judge_run(judgement.checks, [keep.id]) is Verdict.INCOMPLETE
