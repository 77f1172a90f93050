"""The third floor: the last accepted run, and the best level that accepted runs held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from phases.regression import Regression
from runbook.config.phase import PlanContext
from runbook.folder.facts import env_facts, other_work, unlike
from runbook.records import Check, LaunchStatus, Outcome, Reason, Verdict, judge_run
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from runbook.stats.plans import REGRESSION_PLAN
from tests.phases import builder, heartbeats, spoil, traces
from tests.phases.answers import (
    DAMAGED,
    FINE,
    NOT_GATED,
    TOO_LITTLE,
    TOO_MUCH,
    UNLIKE,
    WARNED,
    WHERE,
    said,
    says,
)

LAST, BEST = "against_last_accepted", "against_best_accepted"


def accepted_row(
    what: str,
    *history: float,
    rate: float = 1e5,
    where: Any = WHERE,
    facts: dict[tuple[str, str], str] | None = None,
    **fields: Any,
) -> Check:
    """The row of a run at `rate` after accepted runs at these rates."""
    found = builder.evidence("baseline", where)
    launches = {
        name: traces.healthy(made.launch, where.profile, rate=rate * (1 + 0.01 * index))
        for index, (name, made) in enumerate(found.launches.items())
    }
    found = replace(found, launches=launches)
    accepted = builder.accepted(found, *history, facts=facts).model_copy(update=fields)
    return builder.row("baseline", what, replace(found, accepted=accepted), where)


ERODED = [1e5 * 0.99**night for night in range(14)]
NIGHT = ERODED[-1] * 0.99
FIRST = (Outcome.SKIPPED, Reason.NO_ACCEPTED_RUN)
GONE = "baseline/run1/training.csv is not the file"
DAMAGE = {"damaged": {"run7": f"{GONE} of its MANIFEST.sha256"}, "rate": 5e4}
EARLIER = {"damaged": {"run0": "its run.json is gone"}}
ON_CPU = {"where": builder.context("cpu"), "rate": 2e4}


def other(kind: str, fact: str) -> dict[str, Any]:
    return {"facts": {(kind, fact): "another"}}


@pytest.mark.parametrize(("what", "history", "options", "wanted", "words", "remedy"), [
    (LAST, [0.9e5, 1e5], {}, FINE, "against run2 (run.json aaaaaaaaaaaa)", ""),
    (LAST, [1e5], {"rate": 8e4}, TOO_MUCH, "", "runbook compare"),
    (LAST, [1e5], {"rate": 9.4e4}, WARNED, "suspected, not shown", ""),
    # The first run has nothing to lose and is not held back.
    (LAST, [], {}, FIRST, "", ""), (BEST, [], {}, FIRST, "", ""),
    (BEST, [1e5, 1e5], {}, FIRST, "", ""),
    # Slow erosion is held against the best level.
    (LAST, ERODED, {"rate": NIGHT}, FINE, "", ""),
    (BEST, ERODED, {"rate": NIGHT}, TOO_MUCH, "14 earlier runs", ""),
    # A run of another configuration or machine is none; another version is compared and named.
    *((LAST, [2e5], other(*fact), FIRST, "", "") for fact in
      (("work", "config_sha256"), ("machine", "device.name"), ("toggles", "toggle NSA_X"))),
    *((LAST, [2e5], other(*fact), TOO_MUCH, f"differs: {fact[1]} another -> ", "") for fact in
      (("software", "versions.torch"), ("code", "git.sha"), ("software", "driver"),
       ("cards", "device.uuids"))),
    (LAST, [], {"left_out": {"run7": "run.json is not the file of its MANIFEST.sha256"}}, FIRST,
     "not taken: run7: run.json is not the file", ""),
    # A damaged last run is not the same as none: SKIPPED satisfies, and any loss was a GO.
    *((LAST, history, DAMAGE, DAMAGED, f"run7: {GONE}", remedy) for history in ([], [1e5])
      for remedy in ("runbook verify", "move that folder")),
    # Damage before the last accepted run hides the best level only.
    (LAST, [1e5] * 6, EARLIER, FINE, "", ""),
    (BEST, [1e5] * 6, EARLIER, DAMAGED, "run0: its run.json is gone", ""),
    (LAST, [], {"problem": "accepted.json is not JSON"}, DAMAGED, "", ""),
    # On shared cores it is shown and never decides.
    (LAST, [1e5], ON_CPU, NOT_GATED, "is shown", ""),
])  # fmt: skip
def test_what_accepted_runs_make_of_a_run(
    what: str, history: list[float], options: dict[str, Any], wanted: Any, words: str, remedy: str
) -> None:
    says(accepted_row(what, *history, **options), wanted, words, remedy=remedy)


def test_the_last_accepted_run_is_a_source() -> None:
    check = accepted_row(LAST, 0.9e5, 1e5)
    assert (check.limit, check.comparator.value) == (0.05, "<=")
    sources = {source.path: source.sha256 for source in check.measurement.sources}
    assert sources["baseline/accepted.json"] == heartbeats.SHA
    assert check.measurement.interval[0] < 0.05


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (accepted_row(LAST, 1e5, rate=8e4), Verdict.NO_GO),
        (accepted_row(LAST), Verdict.GO),
        (accepted_row(BEST, 1e5, 1e5), Verdict.GO),
        (accepted_row(LAST, **DAMAGE), Verdict.INCOMPLETE),
        # No other skip is enough.
        (accepted_row("throughput_aim", 1e5), Verdict.INCOMPLETE),
    ],
)
def test_only_a_first_run_is_a_go_without_a_number(check: Check, verdict: Verdict) -> None:
    assert judge_run([check], [check.id]) is verdict


def test_another_card_of_the_same_model_is_the_same_machine() -> None:
    """The trainer's own list of cards, too: else a slow card that was put in is never seen."""
    card = {"type": "cuda", "name": "NVIDIA A100 80GB PCIe"}
    one, two = (env_facts({"device": card | {"uuids": uuids}}) for uuids in (["1"], ["2"]))
    (found,) = unlike(one, two)
    assert (found.kind, found.what) == ("cards", "device.uuids")
    assert other_work(one, two) == []


# Two commits in turn: each row's answer, and when more rounds are asked for.

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
    assert not Regression().needs_more(found, where)
    checks = builder.judge("regression", found, where).checks
    assert {check.id: check.outcome for check in checks if check.outcome is not Outcome.PASS} == {}


@pytest.mark.parametrize(
    "where", [pytest.param(GPU, id="gpu", marks=pytest.mark.slow), pytest.param(CPU, id="cpu")]
)
def test_a_suspected_loss_asks_for_all_rounds_and_is_open_until_then(where: PlanContext) -> None:
    first = slower(1.05, where, rounds=REGRESSION_PLAN.first)
    assert len(Regression().needs_more(first, where)) == 2 * REGRESSION_PLAN.more
    assert said(row("pace", first, where)) == (Outcome.INCOMPLETE, Reason.NOT_RUN)
    check = says(row("pace", slower(1.05, where), where), TOO_LITTLE)
    assert ("by the clock" in check.reason) is where.profile.has_gpu
    assert check.measurement is not None and check.measurement.n == ROUNDS
    assert check.measurement.value == pytest.approx(1 / 1.05, rel=0.005)


def test_processor_time_decides_where_throughput_is_not_gated() -> None:
    table = builder.judge("regression", slower(1.0, CPU), CPU).tables[0]
    assert "CPU time" in table.note and table.columns[1].endswith("tok/CPU-s")
    assert len(table.rows) == ROUNDS


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
    assert change is not CRASHED or not Regression().needs_more(found, CPU)


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
