"""What the A/B phases share: the control, unlike arms, noise, and stopping when it is known."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest

from runbook.config.registry import Judgement
from runbook.records import Outcome, Verdict, judge_run
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from tests.phases import answers, builder, spoil, traces
from tests.phases.answers import WHERE, get, judged, noisy, said, says
from tests.phases.trainer import cut_by

PHASES = builder.PHASES
# The row that chooses.
CHOICE = {"bucket_sweep": "bucket_sweep.best", "fused_adamw": "fused_adamw.keep"}


def test_the_control_is_held_against_a_prediction_interval() -> None:
    """Student's t for one more launch: mean ± t s sqrt(1 + 1/n) of the logs, by hand."""
    rates = (1e5, 1.08e5, 0.95e5, 1.02e5, 0.97e5)
    check = answers.row("bucket_sweep", "control", rate=1e5, earlier=builder.baseline_at(*rates))
    logs = [math.log(rate) for rate in rates]
    reach = 4.604095 * statistics.stdev(logs) * math.sqrt(6 / 5)  # t(0.995; 4), printed tables
    low, high = (math.exp(statistics.mean(logs) + side) for side in (-reach, reach))
    assert check.measurement.interval == pytest.approx((low, high), rel=1e-6)


@pytest.mark.parametrize("phase", CHOICE)
def test_arms_of_different_commits_choose_nothing(phase: str) -> None:
    where = builder.context(protocol="launches")
    newer, last = spoil.at("env.git", sha="2" * 40), PHASES[phase].plan(where)[-1].name
    found = builder.evidence(phase, where, change=newer, only=[last])
    judgement = builder.judge(phase, found, where)
    says(get(judgement, CHOICE[phase]), "INVALID not_comparable")
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


@pytest.mark.parametrize("other", [0.953e5, 1.047e5])
def test_an_a_a_is_judged_alike_in_both_directions(other: float) -> None:
    """A variant that looked 4.7 % faster than itself was KEEP, one 5.5 % slower INVALID."""
    found = judged("fused_adamw", {"baseline": 1e5, "again": other}, builder.context(aa=True))
    says(
        get(found, CHOICE["fused_adamw"]), "INVALID not_plausible", "difference between equal arms"
    )


@pytest.mark.parametrize("phase", CHOICE)
def test_an_a_a_of_equal_arms_is_a_tie(phase: str) -> None:
    check = get(judged(phase, {}, builder.context(aa=True)), CHOICE[phase])
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
    says(get(judgement, CHOICE[phase]), "INCONCLUSIVE undecided", "changed its pace")
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
    best = says(get(judgement, "bucket_sweep.best"), "PASS ok", words)
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


def _twice(made: LaunchEvidence) -> LaunchEvidence:
    """Every arm's DDP got twice its cap: the largest arm has one bucket of all gradients."""
    sizes = made.launch.schedule.settings
    told = tuple(
        {"arm": arm, "block": 0, **cut_by(2 * float(one["NSA_DDP_BUCKET_MB"]), 150.0)}
        for arm, one in sizes.items()
    )
    return spoil.every_rank(ddp_buckets=told)(made)


GIVEN = "a setting that it was given"


def test_one_bucket_of_twice_the_cap_is_the_trainers_to_answer_for() -> None:
    silent = spoil.both(_twice, spoil.without_effect("NSA_DDP_BUCKET_MB"))
    differ = answers.row("bucket_sweep", "buckets_differ", silent)
    says(differ, "INVALID no_effect", "one bucket of 200.00 MiB", remedy=GIVEN)
    assert "below the size of the model's gradients" not in differ.remedy


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


# Fused AdamW: kept, dropped or undecided, and whose fault an ended launch is.


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


@pytest.mark.parametrize(
    ("change", "rate", "says"),
    [(None, 1.05e5, "KEEP"), (None, 0.9e5, "DROP"), (spoil.jitter(0.25), 0.98e5, ""),
     (refused, 1e5, "WARNING: DROP")],
)  # fmt: skip
def test_fused_is_kept_unless_it_is_slower_and_stays_unset_near_the_margin(
    change: spoil.Change | None, rate: float, says: str
) -> None:
    judgement = fused(change, rates={"fused": rate})
    assert row(judgement, "keep").reason.startswith(says)
    assert judgement.choices == ({"NSA_OPT_FUSED": "1"} if says == "KEEP" else {})
    if change is refused:
        assert {said(row(judgement, what)) for what in ("completed", "plausible")} == {"PASS ok"}
        assert "fused=True needs CUDA" in row(judgement, "keep").reason
    else:
        (table,) = judgement.tables
        assert [one[0] for one in table.rows] == ["baseline", "fused"]


def test_the_safe_mode_leaves_nothing_to_compare_and_never_a_go() -> None:
    judgement = fused(where=replace(WHERE, toggles={"NSA_DDP_SAFE_MODE": "1"}))
    assert {said(check) for check in judgement.checks} == {"SKIPPED not_comparable"}
    keep = row(judgement, "keep")
    assert keep.required and "NSA_DDP_SAFE_MODE=1 forbids NSA_OPT_FUSED=1" in keep.reason
    assert judge_run(judgement.checks, [keep.id]) is Verdict.INCOMPLETE


def test_the_kernel_table_names_every_branch_of_every_arm() -> None:
    found = builder.evidence("sdpa_audit", WHERE)
    (table,) = builder.judge("sdpa_audit", found, WHERE).tables
    assert table.rows[0] == ("default", "explicit_softmax", "flash", "flash")
    assert table.rows[2] == ("no_flash", "explicit_softmax", "efficient", "efficient")
