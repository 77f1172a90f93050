"""Trainers that are not ours, really launched: what each check says, and each one made to fail."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from runbook.config import registry
from runbook.config.load import load_profile
from runbook.config.registry import PlanContext
from runbook.records import LaunchStatus, Outcome, Reason
from runbook.records.evidence import PhaseEvidence
from tests.factory.tables import rows, table
from tests.own.runs import COUNTING, LOG, TRAINERS, document, judged, launched, profile_of
from tests.own.test_run import runbook

ANSWERED = {
    "completed", "ranks_alive", "loss_finite", "plausible", "accounts", "other_work",
}  # fmt: skip


def test_a_healthy_one_passes_what_can_be_told_and_nothing_else(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, document())
    evidence = launched(profile, tmp_path / "run")
    assert evidence.result.status is LaunchStatus.COMPLETED, evidence.result.cause
    checks = judged(profile, evidence)
    passed = {name for name, check in checks.items() if check.outcome is Outcome.PASS}
    assert passed >= ANSWERED - {"other_work"}
    contract = {name for name, check in checks.items() if check.code is Reason.NEEDS_CONTRACT}
    assert {"oracle", "gradients", "as_planned", "toggles_effective", "mfu"} <= contract
    assert all(checks[name].outcome is Outcome.SKIPPED for name in contract)
    rate = checks["throughput"].measurement
    # Tokens of both ranks: over the whole launch, its start included, and over the sleeps alone.
    steps = len(pd.read_csv(tmp_path / "run/baseline/run1/own/metrics.csv"))
    assert 2 * 100 * steps / evidence.result.duration_s < float(rate.value) < 2 * 100 / 0.02
    assert {Path(one.path).name for one in rate.sources} == {"metrics.csv", "arrivals.csv"}


# What is found by its silence; a slow start is none of the others.
SILENT = ("hang", "deaf")


FAULTS = {row.get("name", row["fault"]): row for row in rows(__file__, "faults")}
# How other ends are read, and which rows count, is told in test_own_log.py without a launch.


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_makes_its_check_fail(tmp_path: Path, name: str) -> None:
    row, phase = FAULTS[name], FAULTS[name].get("phase", "baseline")
    fault = row["fault"]
    more: dict[str, Any] = {"silence_s": 1.5 if fault in SILENT else 20}
    if fault == "behind":
        more["heartbeats"] = {"path": "{out}/alive_{rank}.jsonl", "step": "at"}
    if row.get("tells_norm"):
        more["log"] = {**LOG, "columns": {**LOG["columns"], "grad_norm": "norm"}}
    profile = profile_of(tmp_path, document(fault, **more))
    found = judged(profile, launched(profile, tmp_path / "run", phase), phase)[row["check"]]
    assert (found.outcome, found.code) == (row["outcome"], row["code"]), found.reason
    assert "hunter22" not in found.reason and row.get("said", "") in found.reason
    if fault == "hang":  # one voice for all ranks accuses none
        told = json.loads((tmp_path / "run/baseline/run1/incident.json").read_text("utf-8"))
        assert [(one["rank"], one["pid"]) for one in told["ranks"]] == [(None, None)]


@table(__file__, "memory")
def test_memory_of_its_processes_that_grows_is_a_leak(
    tmp_path: Path, mib_per_step: float, check: str, code: str
) -> None:
    profile = profile_of(tmp_path, document())
    evidence = launched(profile, tmp_path / "run", "long_run")
    seen = evidence.processes
    assert seen is not None and set(seen["rank"]) == {-1, 0, 1} and seen["rss_mib"].max() > 1
    rows = [(0.5 * step, step, pid, pid - 7, 500.0 + mib_per_step * step)
            for step in range(1, 101) for pid in (7, 8)]  # fmt: skip
    grown = pd.DataFrame(rows, columns=list(seen.columns))
    checks = judged(profile, replace(evidence, processes=grown), "long_run")
    assert checks[check].code == code, checks[check].reason
    assert code != "leak" or "(limit 16 GiB)" in checks[check].title  # of two processes
    # What it needs to save its model is behind its last step.
    saving = grown.assign(rss_mib=grown["rss_mib"] + 200.0 * (grown["step"] == 100))
    checks = judged(profile, replace(evidence, processes=saving), "long_run")
    assert check != "memory_plateau" or checks[check].code == code, checks[check].reason


@pytest.mark.parametrize("phase", ["bucket_sweep", "v2_parity"])
def test_a_phase_about_our_settings_starts_nothing_and_says_why(tmp_path: Path, phase: str) -> None:
    context = PlanContext(profile=profile_of(tmp_path, document()))
    one = registry.phases()[phase]
    assert one.plan(context) == [] and one.own_checks(context) == ()
    checks = one.judge(PhaseEvidence(), context).checks
    assert {check.id for check in checks} == {*one.check_ids(context)}
    assert {check.outcome for check in checks} == {Outcome.SKIPPED}
    assert {check.code for check in checks} == {Reason.NEEDS_CONTRACT}


@table(__file__, "descriptions")
def test_what_is_wrong_with_a_description_is_said(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=r"counting\.yaml") as caught:
        profile_of(tmp_path, document(**change))
    assert said in str(caught.value)
    assert "own_trainer" not in str(caught.value)


def test_a_check_that_it_cannot_answer_is_not_required_of_it(tmp_path: Path) -> None:
    changed = {**document(), "required": ["baseline.completed", "baseline.oracle"]}
    with pytest.raises(ValueError, match=r"cannot answer baseline\.oracle") as caught:
        profile_of(tmp_path, changed)
    assert "baseline.plausible" in str(caught.value)


def test_every_check_that_the_page_promises_has_an_answer(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "your-trainer.md"
    table = page.read_text("utf-8").partition("| check | evidence |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line]
    promised = set(re.findall(r"`(\w+)`", " ".join(cells)))
    assert promised > ANSWERED
    alone = f"{sys.executable} {COUNTING} --ranks 1 --steps {{steps}} --out {{out}}"
    context = PlanContext(profile=profile_of(tmp_path, document(single=alone)))
    asked = (registry.phases()[name] for name in ("baseline", "single_gpu", "long_run"))
    answered = {check.partition(".")[2] for one in asked for check in one.own_checks(context)}
    assert promised <= answered


_LIVED = {"ranks_alive", "loss_finite", "plausible"}


@pytest.mark.e2e
@pytest.mark.slow
@table(__file__, "public_trainers")
def test_a_trainer_is_found_and_judged_as_it_is(
    tmp_path: Path, script: str, needs: str, command: str, more: list[str],
    columns: dict[str, str],
) -> None:  # fmt: skip
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: pip install 'nsa-runbook[trainers]'")
    typed = command.replace("{script}", str(TRAINERS / f"{script}.py"))
    told = runbook(
        tmp_path, "init", "--trainer", typed, "--tokens-per-rank", "64", "--profile", "cpu",
        "--ranks", "2", *more,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    profile = load_profile(str(tmp_path / f"{script}.yaml"))
    assert profile.own_trainer is not None and profile.own_trainer.log.columns == columns
    assert {f"baseline.{name}" for name in _LIVED} <= set(profile.required)
    short = profile.phases["baseline"].model_copy(update={"launches": 1, "steps": 60})
    profile = profile.model_copy(update={"phases": {**profile.phases, "baseline": short}})
    evidence = launched(profile, tmp_path / "run")
    checks = judged(profile, evidence)
    passed = {name for name in _LIVED if checks[name].outcome is Outcome.PASS}
    assert passed == _LIVED, {name: checks[name].reason for name in _LIVED}
    assert evidence.training is not None and evidence.training.frame["step"].iloc[-1] > 50
