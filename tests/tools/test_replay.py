"""The hand-written reports, judged by their own rules; and each rule switched on and off."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from runbook.errors import UsageError
from runbook.records.outcome import Outcome, Verdict
from runbook.tools.replay import Breach, Report, load_report
from runbook.tools.replay.judge import RULES, ReplayRecord, judge_report
from tests.cli.shell import inside

CASES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("replay.yaml").read_text("utf-8"))


def judged(name: str) -> ReplayRecord:
    return judge_report(load_report(name)[0])


def judge(data: dict[str, Any]) -> ReplayRecord:
    return judge_report(Report.model_validate(data))


def broken(judgement: ReplayRecord) -> set[str]:
    return {item.rule for item in judgement.contradictions}


@pytest.mark.parametrize(("rule", "phase", "fact"), CASES["named"])
def test_the_v4_report_contradicts_itself_here(rule: str, phase: str, fact: str) -> None:
    found = [
        item
        for item in judged("report_v4").contradictions
        if item.rule == rule and item.phase == phase and fact in item.found
    ]
    assert len(found) == 1
    assert found[0].rule_text == RULES[rule].text


def honest() -> dict[str, Any]:
    """A report with nothing wrong in it."""
    return deepcopy(CASES["honest"])


def test_an_honest_report_is_a_go_and_contradicts_nothing() -> None:
    """Otherwise the rules would find fault with anything."""
    judgement = judge(honest())
    assert judgement.contradictions == ()
    assert judgement.verdict is Verdict.GO, judgement.checks


def spoil(path: str, value: object) -> dict[str, Any]:
    data = honest()
    place: Any = data
    *parents, last = path.split("/")
    for part in parents:
        place = place[int(part) if isinstance(place, list) else part]
    place[int(last) if isinstance(place, list) else last] = value
    return data


@pytest.mark.parametrize(("path", "value", "rule", "verdict"), CASES["changes"])
def test_one_change_breaks_one_rule(path: str, value: object, rule: str, verdict: str) -> None:
    judgement = judge(spoil(path, value))
    assert judgement.verdict == verdict
    assert rule in broken(judgement)


@pytest.mark.parametrize(
    "claim", ["PASS, no NaN", "GO: 0 failures", "passed without errors", "inferred: 300 tok/s"]
)
def test_a_claim_that_denies_a_failure_is_none(claim: str) -> None:
    assert judge(spoil("phases/long_run/claim", claim)).verdict is Verdict.GO


@pytest.mark.parametrize("phase", ["baseline", "fineweb"])
def test_no_contradiction_leaves_a_go(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FAIL of an optional phase is none of the run."""
    for outcome in (Outcome.INVALID, Outcome.FAIL):
        broken = Breach(phase, "x", "y", outcome)
        rule = RULES["mean.of_rates"]._replace(breaches=lambda _, broken=broken: iter([broken]))
        monkeypatch.setitem(RULES, "mean.of_rates", rule)
        fails = outcome is Outcome.FAIL and phase == "baseline"
        assert judge(honest()).verdict is (Verdict.NO_GO if fails else Verdict.INCOMPLETE)


def test_a_tie_keeps_the_configured_value() -> None:
    data = spoil("phases/bucket_sweep/results/1/launches", [150e3, 149e3, 151e3])
    assert "choice.not_shown" in broken(judge(data))
    data["phases"]["bucket_sweep"]["results"][1]["control"] = True
    assert "choice.not_shown" not in broken(judge(data))


# The command


@pytest.mark.executes("runbook replay")
def test_the_command_prints_verdict_and_rules(tmp_path: Path) -> None:
    told = inside("replay", "report_v4", cwd=tmp_path)
    assert told.code == 1 and told.out.startswith("NO-GO")
    assert told.out.count("rule:") == len(judged("report_v4").contradictions)
    told = inside("replay", "first_report", "--json", cwd=tmp_path)
    assert told.code == 3
    data = json.loads(told.out)
    assert (data["verdict"], data["schema_version"]) == ("INCOMPLETE", 2)
    assert len(data["sha256"]) == 64


@pytest.mark.parametrize(("path", "value", "says"), CASES["bad"])
def test_bad_values(path: str, value: object, says: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(spoil(path, value)))
    with pytest.raises(UsageError) as caught:
        load_report(str(tmp_path / "bad.yaml"))
    assert says in str(caught.value)


def test_a_name_that_is_no_report() -> None:
    with pytest.raises(UsageError, match="did you mean 'report_v4'"):
        load_report("report_v")
