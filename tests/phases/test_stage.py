"""The kind `training`: what a plan's phase launches, and every row of its gate."""

from __future__ import annotations

import math
from typing import Any

import pytest

from runbook.config import registry
from runbook.config.load import load_profile
from runbook.config.phase import PlanContext
from runbook.config.plan import load_plan, with_plan
from runbook.config.profile import Profile
from runbook.records import Begun, Check, Launch, LaunchStatus, Outcome, Reason, judge_run
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from runbook.records.launch import option
from runbook.records.outcome import Verdict
from tests.phases import builder, spoil
from tests.phases.answers import (
    FINE,
    MACHINE,
    NOT_FINITE,
    NOT_RUN,
    NOTHING,
    OTHERWISE,
    TOO_LITTLE,
    TOO_MUCH,
    WRONG,
    get,
    row,
    says,
)
from tests.phases.heartbeats import told
from tests.phases.test_long_run import second_rank
from tests.phases.traces import healthy


def context(name: str = "a100x2_pcie4", **changes: object) -> PlanContext:
    profile = load_profile(name)
    plan = load_plan("production", has_gpu=profile.has_gpu)
    return PlanContext(profile=with_plan(profile, plan, shipped=True), **changes)  # type: ignore[arg-type]


WHERE = context()


def planned(phase: str, where: PlanContext = WHERE) -> list[Launch]:
    return registry.phases_of(where.profile.phases)[phase].plan(where)


def checks(
    phase: str,
    change: spoil.Change | None = None,
    *,
    only: str = "",
    where: PlanContext = WHERE,
    **known: Any,
) -> dict[str, Check]:
    """Healthy launches of the phase, those named spoiled, judged."""
    made = {launch.name: healthy(launch, where.profile) for launch in planned(phase, where)}
    if "resumed" in made:
        made["resumed"] = again(made["run"], made["resumed"])
    if change:
        made |= {name: change(one) for name, one in made.items() if only in ("", name)}
    facts = builder.facts(**builder.machine(where.profile), **known)
    judged = registry.phases_of(where.profile.phases)[phase].judge(
        PhaseEvidence(launches=made, facts=facts), where
    )
    return {check.id.partition(".")[2]: check for check in judged.checks}


def again(first: LaunchEvidence, second: LaunchEvidence, last: float = 1.0) -> LaunchEvidence:
    """The second launch with the first one's losses, as after an exact resume, but for the last."""
    losses = first.training.frame["loss"].to_numpy()[-len(second.training.frame) :].copy()
    losses[-1] *= last
    return told(spoil.columns(loss=losses)(second))


@pytest.mark.parametrize("phase", ["sanity", "smoke", "extended", "production"])
@pytest.mark.parametrize("name", ["a100x2_pcie4", "h100x1", "cpu"])
def test_a_healthy_launch_passes_every_gate(name: str, phase: str) -> None:
    where = context(name)
    found = checks(phase, where=where)
    required = [one for one in where.profile.required if one.startswith(f"{phase}.")]
    bad = [one.reason for one in found.values() if one.outcome is not Outcome.PASS]
    assert judge_run(found.values(), required) is Verdict.GO, bad


@pytest.mark.parametrize(("phase", "apart"), [("sanity", 1), ("production", -1), ("smoke", 0)])
def test_a_launch_behind_a_go_trains_the_model_of_that_run(phase: str, apart: int) -> None:
    profile, plan = load_profile("cpu"), load_plan("production", has_gpu=False)
    (first, *_) = planned(phase, context("cpu"))
    count = (healthy(first, profile).env or {})["effective"]["n_params"]
    behind = with_plan(profile, plan, shipped=True, go="RUN: GO", parameters=count + apart)
    found = checks(phase, where=PlanContext(profile=behind))["as_planned"]
    if not apart:
        assert found.outcome is Outcome.PASS, found.reason
        return
    says(found, OTHERWISE, f"parameters: {count + apart} in RUN, which was GO, got {count}")


def instead(made: LaunchEvidence) -> LaunchEvidence:
    """Generated tokens where the plan wants documents, as `data.synthetic_on_fail` lets it."""
    note = "SYNTHETIC DATA instead of fineweb_edu (--synthetic-on-fail): no network"
    return spoil.env(effective={"dataset": "synthetic"}, notes=[note])(made)


@pytest.mark.parametrize("phase", ["smoke", "extended", "production"])
def test_a_phase_that_trained_on_other_data_than_planned_is_no_gate(phase: str) -> None:
    found = checks(phase, instead)["as_planned"]
    says(found, OTHERWISE, "dataset: wanted fineweb_edu, got synthetic (SYNTHETIC DATA instead")


def test_every_phase_of_a_plan_asks_whether_it_ran_as_planned() -> None:
    plan = load_plan("production", has_gpu=False)
    least = plan.phases["smoke"].model_copy(update={"checks": ("loss_finite",)})
    mine = plan.model_copy(update={"phases": {"smoke": least}})
    profile = with_plan(load_profile("cpu"), mine, shipped=False)
    assert profile.required == ("smoke.completed", "smoke.as_planned", "smoke.loss_finite")
    made = registry.phases_of(profile.phases)["smoke"]
    assert set(made.check_ids(PlanContext(profile=profile))) == set(profile.required)


LATE_NAN = spoil.columns(loss=lambda table: table["loss"].where(table["step"] != 7, math.nan))


def counted(rank: int, ended: int) -> spoil.Change:
    return spoil.rank(rank, counts={"step_start": 300, "step_end": ended})


@pytest.mark.parametrize(
    ("what", "change", "expected"),
    [
        ("heartbeats", counted(1, 299), WRONG),
        ("heartbeats", counted(0, 300), WRONG),
        ("heartbeats", spoil.parts(ranks=()), NOTHING),
        ("past_step_5", LATE_NAN, NOT_FINITE),
        ("memory_limit", second_rank(reserved_mib=70_000.0), TOO_MUCH),
        ("no_halt", spoil.parts(halted=True), (Outcome.FAIL, Reason.HALTED)),
        ("gates", spoil.parts(gates=None), NOTHING),
    ],
)
def test_rows_of_the_smoke(
    what: str, change: spoil.Change, expected: tuple[Outcome, Reason]
) -> None:
    found = checks("smoke", change)[what]
    assert (found.outcome, found.code) == expected, found.reason


def test_too_slow_for_the_link_is_no_go_and_the_band_is_shown() -> None:
    third = context("a100x2_pcie3")

    def found(where: PlanContext) -> dict[str, Check]:
        slow = lambda made: healthy(made.launch, where.profile, rate=38.0)  # noqa: E731
        return checks("smoke", slow, where=where)

    says(found(WHERE)["throughput"], TOO_LITTLE)
    assert "45-55" in found(WHERE)["throughput_aim"].reason
    assert found(third)["throughput"].outcome is Outcome.PASS


@pytest.mark.parametrize("status", [LaunchStatus.PREEMPTED, LaunchStatus.INTERRUPTED])
def test_a_leg_that_was_ended_from_outside_is_no_failure(status: LaunchStatus) -> None:
    half = spoil.every_rank(counts={"step_start": 2400, "step_end": 2399, "progress": 1200})
    cut = spoil.both(half, spoil.result(status=status))
    rows = checks("production", cut, only="leg03")
    says(rows["completed"], (Outcome.INCOMPLETE, Reason.INTERRUPTED), remedy="--resume")
    assert [row.id for row in rows.values() if row.outcome is Outcome.FAIL] == []
    every = [row.id for row in rows.values()]
    assert judge_run(rows.values(), every) is Verdict.INCOMPLETE


def test_what_no_phase_collected_has_a_remedy_that_can_be_followed() -> None:
    launches = {one.name: healthy(one, WHERE.profile) for one in planned("extended")}
    phase = registry.phases_of(WHERE.profile.phases)["extended"]
    other = {name: one for name, one in builder.facts().items() if name != "disk.free_gib"}
    for facts, wanted in (({}, NOT_RUN), (other, NOTHING)):
        judged = phase.judge(PhaseEvidence(launches=launches, facts=facts), WHERE)
        row = says(get(judged, "extended.storage"), wanted)
        assert ("add the phase preflight to the plan" in row.remedy) is (wanted is NOT_RUN)
        assert ("no phase of this run collects" in row.reason) is (wanted is NOT_RUN)


def test_the_extended_smoke_wants_room_and_time_for_the_checkpoints() -> None:
    full = checks("extended", disk_free_gib=5.0)["storage"]
    says(full, MACHINE, "10 checkpoints of 0.88 GiB")
    late = spoil.rank(0, checkpoints=({"path": "checkpoints/step_950", "seconds": 1e4},))
    slow = checks("extended", late, only="run")["checkpoint_time"]
    assert slow.code is Reason.ABOVE_LIMIT and ", every 5000 steps" in slow.reason
    none = spoil.every_rank(checkpoints=())
    assert checks("extended", none)["checkpoint_time"].outcome is Outcome.INCOMPLETE


def test_a_resumed_launch_is_exact_on_a_cpu_and_within_rounding_on_a_gpu() -> None:
    run = healthy(planned("extended")[0], WHERE.profile)

    def resumed(factor: float) -> Check:
        off = lambda made: again(run, made, factor)  # noqa: E731
        return checks("extended", off, only="resumed")["resumed"]

    whole = says(resumed(1.0), FINE, "steps 951 to 1000 give the same losses, bit for bit")
    assert "took 1.00 s to write" in whole.reason
    assert resumed(1.0001).outcome is Outcome.PASS
    says(resumed(1.01), WRONG, "from step 1000")


def test_the_extended_smoke_resumes_its_own_last_checkpoint() -> None:
    run, second = planned("extended")
    assert run.config_overrides["train.save_every"] == 950
    assert (second.resumes, second.after, second.steps) == ("run", 950, 1000)
    assert second.words()[-2:] == ("--resume", "extended/run")


def test_production_takes_a_leg_between_two_checkpoints() -> None:
    legs = planned("production")
    assert [leg.steps for leg in legs] == list(range(5000, 50_001, 5000))
    assert [leg.resumes for leg in legs] == ["", *(f"leg{n:02}" for n in range(1, 10))]
    assert all("--save" in leg.argv and leg.watched for leg in legs)
    assert {option(leg.argv, "--run-steps") for leg in legs} == {"50000"}, "one schedule"
    assert legs[0].env["NSA_TB_DISABLE"] == "0"


def test_least_steps_stay_under_a_scale() -> None:
    where = context("cpu", steps_scale=0.001)
    steps = {name: planned(name, where)[0].steps for name in ("sanity", "smoke", "extended")}
    assert steps == {"sanity": 1, "smoke": 30, "extended": 200}


def test_a_plan_asks_of_a_machine_only_what_it_can_answer() -> None:
    def needed(name: str) -> set[str]:
        profile: Profile = context(name).profile
        return {one for one in profile.required if not one.startswith("preflight.")}

    two, one, cpu = (needed(name) for name in ("a100x2_pcie4", "h100x1", "cpu"))
    assert two - one == {f"{phase}.gpu_balance" for phase in ("smoke", "extended", "production")}
    assert {"smoke.throughput", "smoke.steady", "smoke.gpu_utilisation"} <= one - cpu
    assert {"extended.resumed", "extended.storage", "smoke.gates"} <= cpu


@pytest.mark.parametrize("sha256", ["ab" * 32, "cd" * 32])
def test_a_leg_that_went_on_from_another_checkpoint_than_its_own(sha256: str) -> None:
    where = context("cpu", steps_scale=0.02)
    begun = Begun(path="production/leg1/checkpoints/step_50", step=50, sha256="ab" * 32)

    found = {"path": "/x/production/leg1/checkpoints/step_25", "step": 25, "sha256": sha256}
    change = spoil.both(spoil.result(begun=begun), spoil.env(resumed=found))
    judged = checks("production", change, only="leg2", where=where)
    rows = (judged["as_planned"], judged["plausible"])
    if sha256 == begun.sha256:
        assert {one.outcome for one in rows} == {Outcome.PASS}, [one.reason for one in rows]
        return
    for one in rows:
        says(one, OTHERWISE, "from step 25 (leg1/checkpoints/step_25), and not from")
        assert "causal" not in one.remedy


# FineWeb: skipped without its package, and judged by its loader and its loss.

PLAIN = builder.context()
NO_PACKAGE = spoil.ended(
    LaunchStatus.CONFIG_ERROR, cause="dataset fineweb_edu needs the package datasets"
)
falling = spoil.columns(loss=lambda table: 5.5 - 0.005 * table["step"])


def test_the_loader_is_tried_in_three_short_steps_before_the_launch() -> None:
    smoke, train = builder.PHASES["fineweb"].plan(PLAIN)
    tried = "--ddp 0 --steps 3 --seq-len 1024 --batch-size 1 --loader-timeout 60 "
    assert f"--dataset fineweb_edu {tried}" in smoke.command_line()
    trained = "--ddp 1 --steps 200 --loader-timeout 120 "
    assert f"--dataset fineweb_edu {trained}" in train.command_line()


def test_without_the_package_fineweb_is_skipped_with_its_name() -> None:
    found = builder.evidence("fineweb", PLAIN, change=NO_PACKAGE)
    checks = builder.judge("fineweb", found, PLAIN).checks
    assert {check.outcome for check in checks} == {Outcome.SKIPPED}
    assert all("datasets" in check.reason for check in checks)


@pytest.mark.parametrize(
    ("what", "change", "expected"),
    [
        ("progress", falling, (Outcome.PASS, Reason.OK)),
        ("progress", spoil.columns(loss=5.5), (Outcome.FAIL, Reason.MISMATCH)),
        ("loader", None, (Outcome.PASS, Reason.OK)),
        ("loader", spoil.columns(fetch_s=61.0), TOO_MUCH),
        ("loader", spoil.ended(LaunchStatus.HUNG), (Outcome.FAIL, Reason.HANG)),
        ("loader", instead, (Outcome.INVALID, Reason.MISMATCH)),
        ("as_planned", instead, (Outcome.INVALID, Reason.MISMATCH)),
    ],
)
def test_fineweb_rows(
    what: str, change: spoil.Change | None, expected: tuple[Outcome, Reason]
) -> None:
    says(row("fineweb", what, change), expected)
