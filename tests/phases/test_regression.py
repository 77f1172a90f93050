"""Two commits in turn: each row's answer, and when more rounds are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from phases.regression import Regression
from runbook.config.phase import PlanContext
from runbook.records import Check, LaunchStatus, Outcome, Reason
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from runbook.stats.plans import REGRESSION_PLAN
from tests.phases import builder, spoil
from tests.phases.answers import TOO_LITTLE, UNLIKE, WARNED, said, says

GPU, CPU = builder.context("a100x2_pcie4"), builder.context("cpu")
ROUNDS = REGRESSION_PLAN.first + REGRESSION_PLAN.more
# Launch to launch, up and down: no two launches of a side are exactly alike.
WOBBLE = (1.0, 1.004, 0.997, 1.002, 0.999, 1.003)


def launches(where: PlanContext, side: str) -> list[str]:
    return [one.name for one in Regression().plan(where) if one.name.endswith(side)]


def slower(head: float, where: PlanContext, *, rounds: int = ROUNDS) -> PhaseEvidence:
    """So many rounds in which each step of HEAD takes `head` times as long."""
    found = builder.evidence("regression", where, conditional=True)
    kept: dict[str, LaunchEvidence] = {}
    for name, made in found.launches.items():
        number = int(name[5:7])
        if number > rounds or made.training is None:
            continue
        longer = head if name.endswith("_head") else 1.0
        longer *= WOBBLE[(number + name.endswith("_head") * 2) % len(WOBBLE)]
        kept[name] = stretched(made, longer)
    return replace(found, launches=kept)


def stretched(made: LaunchEvidence, longer: float) -> LaunchEvidence:
    return builder._changed(made, spoil.slower(longer))


def row(what: str, found: PhaseEvidence, where: PlanContext = CPU) -> Check:
    return builder.row("regression", what, found, where)


def spoiled(change: spoil.Change, side: str) -> PhaseEvidence:
    only = launches(CPU, side)
    return builder.evidence("regression", CPU, change=change, only=only)


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
    checks = builder.judge("regression", PhaseEvidence(launches={}, facts={}, earlier={}), where)
    assert {check.outcome for check in checks.checks} == {Outcome.INCOMPLETE}


@pytest.mark.parametrize("where", [GPU, CPU], ids=["gpu", "cpu"])
def test_equal_commits_end_after_the_first_rounds(where: PlanContext) -> None:
    found = slower(1.0, where, rounds=REGRESSION_PLAN.first)
    assert Regression().needs_more(found, where) is False
    checks = builder.judge("regression", found, where).checks
    assert {check.id: check.outcome for check in checks if check.outcome is not Outcome.PASS} == {}


@pytest.mark.parametrize(
    "where", [pytest.param(GPU, id="gpu", marks=pytest.mark.slow), pytest.param(CPU, id="cpu")]
)
def test_a_suspected_loss_asks_for_all_rounds_and_is_open_until_then(where: PlanContext) -> None:
    first = slower(1.05, where, rounds=REGRESSION_PLAN.first)
    assert Regression().needs_more(first, where) is True
    assert said(row("pace", first, where)) == (Outcome.INCOMPLETE, Reason.NOT_RUN)
    check = says(row("pace", slower(1.05, where), where), TOO_LITTLE)
    assert ("by the clock" in check.reason) is where.profile.has_gpu
    assert check.measurement is not None and check.measurement.n == ROUNDS
    assert check.measurement.value == pytest.approx(1 / 1.05, rel=0.005)


def test_processor_time_decides_where_throughput_is_not_gated() -> None:
    table = builder.judge("regression", slower(1.0, CPU), CPU).tables[0]
    assert "CPU time" in table.note and table.columns[1].endswith("tok/CPU-s")
    assert len(table.rows) == ROUNDS


def without_cpu_time(made: LaunchEvidence) -> LaunchEvidence:
    told = [replace(one, steps=one.steps.drop(columns="cpu_s")) for one in made.ranks]  # type: ignore[union-attr]
    return replace(made, ranks=tuple(told))


@pytest.mark.parametrize(
    "change",
    [
        spoil.env(package={"path": "/elsewhere/nsa", "sha256": "9" * 64}),
        spoil.env(git={"sha": "c" * 40, "dirty": False}),
        spoil.env(git={"dirty": True}),
        lambda made: replace(made, checkout={**made.checkout, "sha": "c" * 40}),
        lambda made: replace(made, checkout={**made.checkout, "changed": [" M nsa/model.py"]}),
    ],
    ids=["package", "sha", "dirty", "checkout", "changed"],
)
@pytest.mark.parametrize("side", ["reference", "head"])
def test_a_side_that_ran_other_code_than_its_commit_is_invalid(
    change: spoil.Change, side: str
) -> None:
    found = spoiled(change, side)
    assert said(row("checkouts", found)) == (Outcome.INVALID, Reason.MISMATCH)
    assert row("pace", found).outcome is Outcome.INVALID


@pytest.mark.parametrize("status", [LaunchStatus.CRASHED, LaunchStatus.CONFIG_ERROR])
def test_a_reference_that_no_longer_runs_is_invalid_and_asks_for_another(
    status: LaunchStatus,
) -> None:
    found = spoiled(spoil.ended(status), "reference")
    check = row("reference", found)
    assert check.outcome is Outcome.INVALID
    assert "pin another reference" in check.remedy
    assert row("pace", found).outcome is Outcome.INVALID
    assert row("completed", found).outcome is Outcome.PASS


def test_a_head_that_crashes_is_its_own_fault() -> None:
    found = spoiled(spoil.ended(LaunchStatus.CRASHED), "head")
    assert said(row("completed", found)) == (Outcome.FAIL, Reason.CRASH)
    assert row("reference", found).outcome is Outcome.PASS
    assert Regression().needs_more(found, CPU) is False


def test_other_settings_on_one_side_are_not_compared() -> None:
    found = spoiled(spoil.env(config_sha256="d" * 64), "head")
    says(row("comparable", found), UNLIKE, "pin another reference")


def test_a_trainer_that_tells_no_processor_time_is_not_compared_by_it() -> None:
    says(row("pace", spoiled(without_cpu_time, "reference")), UNLIKE, "cpu_s")


def test_a_night_that_was_cut_off_between_two_rounds_is_incomplete() -> None:
    found = slower(1.05, CPU)
    kept: Sequence[str] = sorted(found.launches)[:9]
    cut = replace(found, launches={name: found.launches[name] for name in kept})
    assert row("pace", cut).outcome is Outcome.INCOMPLETE


def test_a_night_whose_pairs_differ_widely_passes_with_a_warning() -> None:
    found = slower(1.0, CPU, rounds=REGRESSION_PLAN.first)
    noisy = {"round02_head": 0.8, "round03_head": 1.02}
    changed = {name: stretched(made, noisy.get(name, 1.0)) for name, made in found.launches.items()}
    says(row("pace", replace(found, launches=changed)), WARNED, "hardly be found")
    assert row("pace", found).code is Reason.OK


def one_rank_stands_still(made: LaunchEvidence) -> LaunchEvidence:
    *others, last = made.ranks
    assert last.steps is not None and others
    stays = last.steps["cpu_s"].where(last.steps["step"] <= 20, last.steps["cpu_s"].iloc[20])
    return replace(made, ranks=(*others, replace(last, steps=last.steps.assign(cpu_s=stays))))


@pytest.mark.parametrize("side", ["reference", "head"])
def test_one_rank_whose_processor_time_stands_still_is_not_hidden_by_the_others(side: str) -> None:
    """HEAD would look twice as fast by it."""
    says(row("pace", spoiled(one_rank_stands_still, side)), UNLIKE, "does not grow in each step")
