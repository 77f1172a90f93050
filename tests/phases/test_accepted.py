"""The third floor: the last accepted run, and the best level that accepted runs held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phases.regression import Regression
from runbook.config.registry import PlanContext
from runbook.records import Check, LaunchStatus, Outcome, Reason, Verdict, judge_run
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from runbook.stats import REGRESSION_PLAN
from tests.phases import builder, spoil, trainer
from tests.phases.answers import WHERE, said, says

LAST, BEST = "against_last_accepted", "against_best_accepted"


def accepted_row(what: str, rate: float, **accepted: Any) -> Check:
    """The row of a run at this rate after such accepted runs."""
    found = builder.evidence("baseline", WHERE, rate=rate)
    return builder.row(
        "baseline", what, replace(found, accepted=builder.accepted(found, **accepted)), WHERE
    )


def test_the_last_accepted_run_is_a_source() -> None:
    check = accepted_row(LAST, 1e5, rates=[0.9e5, 1e5])
    assert (check.limit, check.comparator.value) == (0.05, "<=")
    sources = {source.path: source.sha256 for source in check.measurement.sources}
    assert sources["baseline/accepted.json"] == trainer.SHA
    assert check.measurement.interval[0] < 0.05


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (accepted_row(LAST, 8e4, rates=[1e5]), Verdict.NO_GO),
        (accepted_row(LAST, 1e5), Verdict.GO),
        (accepted_row(LAST, 1e5, damaged={"run7": "gone"}), Verdict.INCOMPLETE),
        # No other skip is enough.
        (accepted_row("throughput_aim", 1e5), Verdict.INCOMPLETE),
    ],
)
def test_only_a_first_run_is_a_go_without_a_number(check: Check, verdict: Verdict) -> None:
    assert judge_run([check], [check.id]) is verdict


# Two commits in turn: each row's answer, and when more rounds are asked for.

GPU, CPU = builder.context("a100x2_pcie4"), builder.context("cpu")
ROUNDS = REGRESSION_PLAN.first + REGRESSION_PLAN.more
# Launch to launch, up and down: no two launches of a side are exactly alike.
WOBBLE = (1.0, 1.004, 0.997, 1.002, 0.999, 1.003)


def slower(head: float, where: PlanContext, *, rounds: int = ROUNDS) -> PhaseEvidence:
    """So many rounds in which each step of HEAD takes `head` times as long."""

    def wobbled(made: LaunchEvidence) -> LaunchEvidence:
        ours = made.launch.name.endswith("_head")
        wobble = WOBBLE[(int(made.launch.name[5:7]) + ours * 2) % len(WOBBLE)]
        return spoil.slower((head if ours else 1.0) * wobble)(made)

    found = builder.evidence("regression", where, conditional=True, change=wobbled)
    kept = {name: one for name, one in found.launches.items() if int(name[5:7]) <= rounds}
    return replace(found, launches=kept)


def row(what: str, found: PhaseEvidence, where: PlanContext = CPU) -> Check:
    return builder.row("regression", what, found, where)


def test_both_sides_take_turns_in_balanced_order() -> None:
    plan = Regression().plan(CPU)
    order = [one.name.partition("_")[2][0] for one in plan]
    assert len(plan) == 2 * ROUNDS
    for first in range(0, len(order), 4):
        assert "".join(order[first : first + 4]) in ("rhhr", "hrrh")
    assert {one.commit for one in plan} == set(builder.COMMITS.values())
    certain = [one for one in plan if not one.conditional]
    assert len(certain) == 2 * REGRESSION_PLAN.first == len(plan) - 2 * REGRESSION_PLAN.more


def test_without_a_reference_nothing_is_planned_and_no_row_vanishes() -> None:
    where = replace(CPU, reference="")
    assert Regression().plan(where) == []
    checks = builder.judge("regression", PhaseEvidence(), where).checks
    assert {check.outcome for check in checks} == {Outcome.INCOMPLETE}


def test_equal_commits_end_after_the_first_rounds() -> None:
    found = slower(1.0, CPU, rounds=REGRESSION_PLAN.first)
    assert not Regression().needs_more(found, CPU)
    checks = builder.judge("regression", found, CPU).checks
    assert {check.id: check.outcome for check in checks if check.outcome is not Outcome.PASS} == {}


@pytest.mark.parametrize(
    "where", [pytest.param(GPU, id="gpu", marks=pytest.mark.slow), pytest.param(CPU, id="cpu")]
)
def test_a_suspected_loss_asks_for_all_rounds_and_is_open_until_then(where: PlanContext) -> None:
    first = slower(1.05, where, rounds=REGRESSION_PLAN.first)
    assert len(Regression().needs_more(first, where)) == 2 * REGRESSION_PLAN.more
    assert said(row("pace", first, where)) == "INCOMPLETE not_run"
    check = says(row("pace", slower(1.05, where), where), "FAIL below_limit")
    assert ("by the clock" in check.reason) is where.profile.has_gpu
    assert check.measurement is not None and check.measurement.n == ROUNDS
    assert check.measurement.value == pytest.approx(1 / 1.05, rel=0.005)


def test_a_head_that_crashes_asks_for_no_more_rounds() -> None:
    crashed = spoil.of_launch("_head", spoil.ended(LaunchStatus.CRASHED))
    found = builder.evidence("regression", CPU, change=crashed)
    assert not Regression().needs_more(found, CPU)


def test_a_night_whose_pairs_differ_widely_passes_with_a_warning() -> None:
    found = slower(1.0, CPU, rounds=REGRESSION_PLAN.first)
    noisy = {"round02_head": 0.8, "round03_head": 1.02}
    changed = {
        name: builder.changed(made, spoil.slower(noisy.get(name, 1.0)))
        for name, made in found.launches.items()
    }
    says(row("pace", replace(found, launches=changed)), "PASS warning", "hardly be found")
    assert row("pace", found).code is Reason.OK
