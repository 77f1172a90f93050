"""Bucket sweep: a winner, a tie, and every way in which the arms decide nothing."""

from __future__ import annotations

import pytest

from runbook.config import registry
from runbook.records import Outcome
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from tests.phases import answers, builder, heartbeats, spoil, traces
from tests.phases.answers import CRASHED, NO_EFFECT, WHERE, WRONG, get, judged, says

PHASES = registry.phases()


def test_a_clearly_better_bucket_wins_and_is_chosen() -> None:
    judgement = judged("bucket_sweep", {"25": 1e5, "50": 1.1e5, "100": 1e5})
    best = get(judgement, "bucket_sweep.best")
    assert best.outcome is Outcome.PASS and best.reason.startswith("WINNER")
    assert "stays" not in best.reason
    assert judgement.choices == {"NSA_DDP_BUCKET_MB": "50"}


def test_equal_buckets_tie_and_the_configured_one_stays_whatever_the_documented_rule_says() -> None:
    judgement = judged("bucket_sweep", {"25": 1e5, "50": 1.0005e5, "100": 1e5})
    best = get(judgement, "bucket_sweep.best")
    assert best.outcome is Outcome.PASS and best.reason.startswith("TIE")
    assert "the configured 25 MB stays" in best.reason
    assert judgement.choices == {"NSA_DDP_BUCKET_MB": "25"}
    assert "by the documented rule alone" in judgement.notes[0]


def test_the_bucket_table_has_a_row_for_each_size_with_the_last_50_steps() -> None:
    judgement = judged("bucket_sweep", {"25": 9e4, "50": 1e5, "100": 8e4}, jitter=False)
    (table,) = judgement.tables
    assert [row[0] for row in table.rows] == ["25", "50", "100"]
    assert [row[1] for row in table.rows] == pytest.approx([9e4, 1e5, 8e4])
    assert all(str(row[3]).startswith("steps ") for row in table.rows)
    assert {row[-1] for row in table.rows} == {"bucket_sweep/interleaved/training.csv"}


def same_buckets(made: LaunchEvidence) -> LaunchEvidence:
    one = tuple({**event, "sizes_mib": [50.0, 50.0]} for event in made.ranks[0].ddp_buckets)
    return spoil.every_rank(ddp_buckets=one)(made)


def one_bucket(made: LaunchEvidence) -> LaunchEvidence:
    one = tuple({**event, "sizes_mib": [8.0]} for event in made.ranks[0].ddp_buckets)
    return spoil.every_rank(ddp_buckets=one)(made)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (same_buckets, "same buckets"),
        (one_bucket, "one bucket of 8.00 MiB"),
        (spoil.every_rank(ddp_buckets=()), "no bucket sizes logged"),
        (spoil.without_effect("NSA_DDP_BUCKET_MB", arm="25"), "in arm 25: did nothing"),
    ],
)
def test_buckets_that_did_not_differ_decide_nothing(change: spoil.Change, text: str) -> None:
    found = builder.evidence("bucket_sweep", WHERE, change=change, rates={"25": 2e5})
    judgement = builder.judge("bucket_sweep", found, WHERE)
    for what in ("buckets_differ", "best"):
        says(get(judgement, f"bucket_sweep.{what}"), NO_EFFECT, text)
    assert judgement.choices == {}


def _twice(made: LaunchEvidence) -> LaunchEvidence:
    """Every arm's DDP got twice its cap: the largest arm has one bucket of all gradients."""
    sizes = made.launch.schedule.settings if made.launch.schedule else {}
    told = tuple(
        {"arm": arm, "block": 0, **heartbeats.cut_by(2 * float(one["NSA_DDP_BUCKET_MB"]), 150.0)}
        for arm, one in sizes.items()
    )
    return spoil.every_rank(ddp_buckets=told)(made)


def test_buckets_of_twice_the_cap_fail_and_the_trainer_is_to_blame() -> None:
    check = answers.row("bucket_sweep", "accounts", _twice)
    says(check, WRONG, "rank 0 in arm 25: DDP's buckets (50/50/50 MiB) are those of a cap")
    assert "a setting that it was given" in check.remedy
    silent = spoil.without_effect("NSA_DDP_BUCKET_MB")
    differ = answers.row("bucket_sweep", "buckets_differ", lambda made: silent(_twice(made)))
    assert "one bucket of 200.00 MiB" in differ.reason
    assert "a setting that it was given" in differ.remedy
    assert "below the size of the model's gradients" not in differ.remedy


def test_an_arm_that_failed_fails_the_sweep() -> None:
    failure = ({"arm": "100", "error": "out of buffers"},)
    check = answers.row("bucket_sweep", "arms_complete", spoil.rank(0, arm_failures=failure))
    says(check, CRASHED, "out of buffers")


def test_one_launch_per_arm_and_round_is_judged_alike() -> None:
    where = builder.context(protocol="launches")
    speed = {"25": 1.2e5, "50": 1e5, "100": 1e5}
    launches = {}
    for number, launch in enumerate(PHASES["bucket_sweep"].plan(where)):
        rate = speed[launch.name.split("_")[0]] * (1 + 0.002 * (number % 4))
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
