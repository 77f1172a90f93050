"""The kind `training`: what a plan's phase launches, and every row of its gate."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from phases.kit.finding import Finding
from phases.stage import time_of
from runbook.config import Profile, registry
from runbook.config.load import load_profile
from runbook.config.plan import load_plan, with_plan
from runbook.config.registry import PlanContext
from runbook.records import (
    Begun,
    Check,
    Launch,
    LaunchResult,
    LaunchStatus,
    Outcome,
    Reason,
    judge_run,
)
from runbook.records.evidence import LaunchEvidence, PhaseEvidence, RankLog, SetAside, TrainingLog
from runbook.records.launch import option
from runbook.records.outcome import Verdict
from tests.factory import records
from tests.phases import builder, spoil
from tests.phases.answers import get, says
from tests.phases.traces import healthy
from tests.phases.trainer import told


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
    found = PhaseEvidence(launches=made, facts=facts)
    judged = registry.phases_of(where.profile.phases)[phase].judge(found, where)
    return {check.id.partition(".")[2]: check for check in judged.checks}


def again(first: LaunchEvidence, second: LaunchEvidence, last: float = 1.0) -> LaunchEvidence:
    """The second launch with the first one's losses, as after an exact resume, but for the last."""
    losses = first.training.frame["loss"].to_numpy()[-len(second.training.frame) :].copy()
    losses[-1] *= last
    return told(spoil.columns(loss=losses)(second))


@pytest.mark.parametrize("phase", ["sanity", "smoke", "extended", "production"])
@pytest.mark.parametrize("name", ["a100x2_pcie4", "cpu"])
def test_a_healthy_launch_passes_every_gate(name: str, phase: str) -> None:
    where = context(name)
    found = checks(phase, where=where)
    required = [one for one in where.profile.required if one.startswith(f"{phase}.")]
    bad = [one.reason for one in found.values() if one.outcome is not Outcome.PASS]
    assert judge_run(found.values(), required) is Verdict.GO, bad


def instead(made: LaunchEvidence) -> LaunchEvidence:
    """Generated tokens where the plan wants documents, as `data.synthetic_on_fail` lets it."""
    note = "SYNTHETIC DATA instead of fineweb_edu (--synthetic-on-fail): no network"
    return spoil.at("env.effective.dataset", "synthetic")(spoil.at("env", notes=[note])(made))


def test_another_model_than_that_of_the_go_is_not_as_planned() -> None:
    profile, plan = load_profile("cpu"), load_plan("production", has_gpu=False)
    behind = with_plan(profile, plan, shipped=True, go="RUN: GO", parameters=5)
    found = checks("sanity", where=PlanContext(profile=behind))["as_planned"]
    says(found, "INVALID mismatch", "parameters: 5 in RUN, which was GO, got ")


def test_a_phase_that_trained_on_other_data_than_planned_is_no_gate() -> None:
    words = "dataset: wanted fineweb_edu, got synthetic (SYNTHETIC DATA instead"
    says(checks("smoke", instead)["as_planned"], "INVALID mismatch", words)


LATE_NAN = spoil.columns(loss=lambda table: table["loss"].where(table["step"] != 7, math.nan))


def counted(rank: int, ended: int) -> spoil.Change:
    return spoil.rank(rank, counts={"step_start": 300, "step_end": ended})


@pytest.mark.parametrize(("what", "change", "expected"), [
    ("heartbeats", counted(1, 299), "FAIL mismatch"),
    ("heartbeats", counted(0, 300), "FAIL mismatch"),
    ("heartbeats", spoil.parts(ranks=()), "INCOMPLETE missing_artifact"),
    ("past_step_5", LATE_NAN, "FAIL non_finite"),
])  # fmt: skip
def test_rows_of_the_smoke(what: str, change: spoil.Change, expected: str) -> None:
    says(checks("smoke", change)[what], expected)


def test_a_leg_that_was_ended_from_outside_is_no_failure() -> None:
    half = spoil.every_rank(counts={"step_start": 2400, "step_end": 2399, "progress": 1200})
    cut = spoil.both(half, spoil.result(status=LaunchStatus.PREEMPTED))
    rows = checks("production", cut, only="leg03")
    says(rows["completed"], "INCOMPLETE interrupted", remedy="--resume")
    assert [row.id for row in rows.values() if row.outcome is Outcome.FAIL] == []


def test_what_no_phase_collected_has_a_remedy_that_can_be_followed() -> None:
    launches = {one.name: healthy(one, WHERE.profile) for one in planned("extended")}
    phase = registry.phases_of(WHERE.profile.phases)["extended"]
    other = {name: one for name, one in builder.facts().items() if name != "disk.free_gib"}
    for facts, wanted in (({}, "INCOMPLETE not_run"), (other, "INCOMPLETE missing_artifact")):
        judged = phase.judge(PhaseEvidence(launches=launches, facts=facts), WHERE)
        row = says(get(judged, "extended.storage"), wanted)
        assert ("add the phase preflight to the plan" in row.remedy) is (facts == {})
        assert ("no phase of this run collects" in row.reason) is (wanted == "INCOMPLETE not_run")


def test_the_extended_smoke_wants_room_and_time_for_the_checkpoints() -> None:
    full = checks("extended", disk_free_gib=5.0)["storage"]
    says(full, "INVALID wrong_environment", "10 checkpoints of 0.88 GiB")
    late = spoil.rank(0, checkpoints=({"path": "checkpoints/step_950", "seconds": 1e4},))
    slow = checks("extended", late, only="run")["checkpoint_time"]
    assert slow.code is Reason.ABOVE_LIMIT and ", every 5000 steps" in slow.reason


def test_a_resumed_launch_is_exact_on_a_cpu_and_within_rounding_on_a_gpu() -> None:
    run = healthy(planned("extended")[0], WHERE.profile)

    def resumed(factor: float) -> Check:
        off = lambda made: again(run, made, factor)  # noqa: E731
        return checks("extended", off, only="resumed")["resumed"]

    says(resumed(1.0), "PASS ok", "steps 951 to 1000 give the same losses, bit for bit")
    assert resumed(1.0001).outcome is Outcome.PASS
    says(resumed(1.01), "FAIL mismatch", "from step 1000")


def test_the_extended_smoke_resumes_its_own_last_checkpoint() -> None:
    run, second = planned("extended")
    assert run.config_overrides["train.save_every"] == 950
    assert (second.resumes, second.after, second.steps) == ("run", 950, 1000)


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


def test_a_leg_that_went_on_from_another_checkpoint_than_its_own() -> None:
    where = context("cpu", steps_scale=0.02)
    begun = Begun(path="production/leg1/checkpoints/step_50", step=50, sha256="ab" * 32)
    found = {"path": "/x/production/leg1/checkpoints/step_25", "step": 25, "sha256": "cd" * 32}
    change = spoil.both(spoil.result(begun=begun), spoil.at("env", resumed=found))
    judged = checks("production", change, only="leg2", where=where)
    for what in ("as_planned", "plausible"):
        words = "from step 25 (leg1/checkpoints/step_25), and not from"
        says(judged[what], "INVALID mismatch", words)


# FineWeb: skipped without its package, and judged by its loader and its loss.

PLAIN = builder.context()
NO_PACKAGE = spoil.ended(
    LaunchStatus.CONFIG_ERROR, cause="dataset fineweb_edu needs the package datasets"
)


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


# Row `goodput`: where the time of a launch went, from spans that are laid out by hand.

T0 = 1_800_000_000.0


def leg(name: str, *, at: float, lasts: float, first: int, ends: list[float]) -> LaunchEvidence:
    """A leg from `at` on, whose steps, the first one `first`, end at `ends` (s after its start).

    A step takes 2 s by dt_s; what lies beside it is a pause.
    """
    steps = list(range(first, first + len(ends)))
    frame = pd.DataFrame({"step": steps, "dt_s": [2.0] * len(steps)})
    marks = pd.DataFrame({"step": steps, "ts": [T0 + at + end for end in ends]})
    rank = RankLog(
        rank=0, path="h", sha256="", events=0, tokens=frozenset(), first_step=first,
        last_step=steps[-1], exit_code=0, exit_reason="", param_hash=None, counts={}, steps=marks,
    )  # fmt: skip
    launch = records.launch(name=name, phase="production", steps=steps[-1])
    begun = Begun(path="c", step=first - 1, sha256="") if first > 1 else None
    result = LaunchResult(
        status=LaunchStatus.COMPLETED, started_at=datetime.fromtimestamp(T0 + at, UTC).isoformat(),
        duration_s=lasts, begun=begun,
    )  # fmt: skip
    log = TrainingLog(path="t", frame=frame, sha256="")
    return LaunchEvidence(launch=launch, result=result, training=log, ranks=(rank,))


def parts(*legs: LaunchEvidence) -> dict[str, float]:
    time = time_of(legs)
    assert not time.below_zero
    names = ("steps", "pauses", "starting", "lost", "waiting", "wall")
    return {name: round(getattr(time, name), 6) for name in names}


ONE = leg("leg1", at=0.0, lasts=20.0, first=1, ends=[8.0, 10.0, 12.0, 17.0])
TWO = leg("leg2", at=100.0, lasts=15.0, first=5, ends=[9.0, 11.0, 13.0])


def test_a_launch_without_a_stumble() -> None:
    """8 s to the first step's end, three steps with a save of 3 s, 3 s until it has ended."""
    assert parts(ONE) == {
        "steps": 6.0, "pauses": 3.0, "starting": 11.0, "lost": 0.0, "waiting": 0.0, "wall": 20.0,
    }  # fmt: skip


def test_what_a_start_trained_that_was_cut_off_is_lost_and_between_starts_it_waits() -> None:
    """Cut off: started at 25, its first step ended at 31, its last word at 55. Then a night."""
    aside = SetAside(folder="f", began=T0 + 25, first_step=T0 + 31, ended=T0 + 55)
    assert parts(ONE, replace(TWO, aside=(aside,))) == {
        "steps": 10.0, "pauses": 3.0, "starting": 11.0 + 6.0 + 11.0, "lost": 24.0,
        "waiting": 5.0 + 45.0, "wall": 115.0,
    }  # fmt: skip
    stillborn = replace(aside, first_step=None)
    assert parts(ONE, replace(TWO, aside=(stillborn,)))["lost"] == 0.0


def test_steps_behind_the_checkpoint_that_a_later_leg_went_on_from_are_lost() -> None:
    """The checkpoint of step 4 was damaged: leg 2 went on from step 3 and trained 4 again."""
    again = leg("leg2", at=100.0, lasts=15.0, first=4, ends=[9.0, 11.0, 13.0])
    found = parts(ONE, again)
    assert (found["steps"], found["lost"]) == (4.0 + 4.0, 2.0)


SOON = SetAside(folder="f", began=T0 + 25, first_step=T0 + 60, ended=T0 + 30)


@pytest.mark.parametrize(("second", "told"), [
    (replace(TWO, result=ONE.result), "waiting"),
    (leg("leg2", at=100.0, lasts=15.0, first=5, ends=[9.0] * 6), "pauses"),
    (leg("leg2", at=100.0, lasts=15.0, first=5, ends=[9.0, 40.0, 55.0]), "starting"),
    (replace(TWO, aside=(SOON,)), "lost"),
])  # fmt: skip
def test_where_clocks_disagree_it_is_told(second: LaunchEvidence, told: str) -> None:
    assert told in time_of([ONE, second]).below_zero


def test_a_leg_without_steps_has_no_goodput() -> None:
    with pytest.raises(Finding, match="has no step"):
        time_of([replace(ONE, ranks=())])


# Each module waits for the other's process: one after the other they would wait for good.
WAITS = """
import os, pathlib, time
def test_meets_the_other():
    here = pathlib.Path(__file__).parent
    (here / "MINE").touch()
    end = time.monotonic() + 60
    while not (here / "OTHER").exists():
        assert time.monotonic() < end, "the other module does not run meanwhile"
        time.sleep(0.01)
"""
FAILS = """
def test_is_wrong():
    print('said before')
    assert 'left' == 'right'
"""


def run(folder: Path, *, first: str = "", second: str = "") -> subprocess.CompletedProcess[str]:
    """pytest on two modules with these tests besides, as a launch calls it."""
    for name, mine, other, more in (("a", "A", "B", first), ("b", "B", "A", second)):
        text = WAITS.replace("MINE", mine).replace("OTHER", other) + more
        (folder / f"test_{name}.py").write_text(text)
    return side_by_side(folder)


def side_by_side(folder: Path) -> subprocess.CompletedProcess[str]:
    """With the plugin, and without a GPU, with which there is one process."""
    options = ["-c", "/dev/null", "-p", "no:cacheprovider", "-p", "nsa.tests.side_by_side"]
    command = [sys.executable, "-m", "pytest", "-q", *options, f"--junitxml={folder}/junit.xml"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=240,
                          check=False, env=hidden)  # fmt: skip


def test_where_there_is_a_gpu_one_process_runs_all(tmp_path: Path) -> None:
    """Who asked whether there is one cannot use it in a fork."""
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text(
            "import os\nimport torch\n\ntorch.cuda.is_available = lambda: True\n\n"
            f"def test_{name}():\n    assert os.getpid() == LOOP\n"
            "LOOP = os.getpid()\n"
        )
    ended = side_by_side(tmp_path)
    assert ended.returncode == 0 and "2 passed" in ended.stdout, ended.stdout + ended.stderr


def test_two_processes_report_as_one(tmp_path: Path) -> None:
    ended = run(tmp_path, first=FAILS, second=FAILS)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    cases = ET.parse(tmp_path / "junit.xml").iter("testcase")
    told = sorted((one.get("name"), one.find("failure") is not None) for one in cases)
    assert told == [("test_is_wrong", True)] * 2 + [("test_meets_the_other", False)] * 2
    assert "2 failed, 2 passed" in ended.stdout
    # What each failed test printed is told beside it, and not the other's.
    assert ended.stdout.count("Captured stdout call") == 2


def test_a_process_that_dies_is_no_pass(tmp_path: Path) -> None:
    ended = run(tmp_path, second="\ndef test_dies():\n    os._exit(0)\n")
    report = tmp_path / "junit.xml"
    assert ended.returncode != 0 or not report.exists(), ended.stdout
