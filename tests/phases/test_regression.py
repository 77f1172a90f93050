"""Two commits in turn: each row's answer, and when more rounds are asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
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


def stuck(steps: pd.DataFrame) -> pd.Series[float]:
    """Processor time that stands still from step 20 on: HEAD would look twice as fast by it."""
    return steps["cpu_s"].where(steps["step"] <= 20, steps["cpu_s"].iloc[20])


MISMATCH, FAILED = (Outcome.INVALID, Reason.MISMATCH), (Outcome.FAIL, Reason.CRASH)
OTHER_CODE = {
    "package": spoil.env(package={"path": "/elsewhere/nsa", "sha256": "9" * 64}),
    "sha": spoil.env(git={"sha": "c" * 40, "dirty": False}),
    "dirty": spoil.env(git={"dirty": True}),
    "checkout": spoil.at("checkout.sha", "c" * 40),
    "changed": spoil.at("checkout.changed", [" M nsa/model.py"]),
}
CRASHED = spoil.ended(LaunchStatus.CRASHED)
SILENT = spoil.at("ranks.*.steps", lambda steps: steps.drop(columns="cpu_s"))
STUCK = spoil.at("ranks.-1.steps.cpu_s", stuck)
INVALID = Outcome.INVALID
ANOTHER = "pin another reference"


@pytest.mark.parametrize(("change", "side", "rows"), [
    # A side that ran other code than its commit.
    *((change, side, {"checkouts": (MISMATCH, ""), "pace": (INVALID, "")})
      for change in OTHER_CODE.values() for side in ("reference", "head")),
    # A reference that no longer runs asks for another; a HEAD that crashes is its own fault.
    *((spoil.ended(status), "reference",
       {"reference": (INVALID, ANOTHER), "pace": (INVALID, ""), "completed": (Outcome.PASS, "")})
      for status in (LaunchStatus.CRASHED, LaunchStatus.CONFIG_ERROR)),
    (CRASHED, "head", {"completed": (FAILED, ""), "reference": (Outcome.PASS, "")}),
    # What is not compared: other settings, no processor time, and that of a rank which stands
    # still and is not hidden by the others.
    (spoil.env(config_sha256="d" * 64), "head", {"comparable": (UNLIKE, ANOTHER)}),
    (SILENT, "reference", {"pace": (UNLIKE, "cpu_s")}),
    *((STUCK, side, {"pace": (UNLIKE, "does not grow in each step")})
      for side in ("reference", "head")),
])  # fmt: skip
def test_a_side_that_is_not_what_was_asked_for(
    change: spoil.Change, side: str, rows: dict[str, Any]
) -> None:
    found = builder.evidence("regression", CPU, change=change, only=launches(CPU, side))
    for what, (wanted, words) in rows.items():
        check = row(what, found)
        assert wanted in (said(check), check.outcome), check.reason
        assert words in check.reason + check.remedy
    assert change is not CRASHED or Regression().needs_more(found, CPU) is False


def test_a_night_that_was_cut_off_between_two_rounds_is_incomplete() -> None:
    found = slower(1.05, CPU)
    kept = {name: found.launches[name] for name in sorted(found.launches)[:9]}
    assert row("pace", replace(found, launches=kept)).outcome is Outcome.INCOMPLETE


def test_a_night_whose_pairs_differ_widely_passes_with_a_warning() -> None:
    found = slower(1.0, CPU, rounds=REGRESSION_PLAN.first)
    noisy = {"round02_head": 0.8, "round03_head": 1.02}
    changed = {
        name: builder.changed(made, spoil.slower(noisy.get(name, 1.0)))
        for name, made in found.launches.items()
    }
    says(row("pace", replace(found, launches=changed)), WARNED, "hardly be found")
    assert row("pace", found).code is Reason.OK
