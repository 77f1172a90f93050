"""The hand-written reports, judged by their own rules; and each rule switched on and off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from runbook.errors import UsageError
from runbook.records.outcome import Outcome, Verdict
from runbook.tools.replay import Breach, Report, load_report
from runbook.tools.replay.judge import RULES, ReplayRecord, judge_report
from tests.cli.shell import inside


def judged(name: str) -> ReplayRecord:
    return judge_report(load_report(name)[0])


def judge(data: dict[str, Any]) -> ReplayRecord:
    return judge_report(Report.model_validate(data))


def broken(judgement: ReplayRecord) -> set[str]:
    return {item.rule for item in judgement.contradictions}


# Each part of each bullet of the design's list: rule, phase, a fact that must be named.
NAMED = [
    ("acceptance.throughput", "baseline", "23 tok/s, floor 39"),
    ("acceptance.config", "baseline", "measured on custom_2048"),
    ("window.too_few_rows", "bucket_sweep", "2 log rows after the first, not 50 steps"),
    ("choice.not_shown", "bucket_sweep", "inside the noise"),
    ("mean.of_rates", "bucket_sweep", "tokens / time gives 438"),
    ("choice.against_rule", "fused_adamw", "475.7 of fused >= 468.3 of baseline"),
    ("scaling.not_shown", "single_gpu", "2.5 to 3.7 times one device"),
    ("phase.not_passed", "sdpa_audit", "timed out"),
    ("acceptance.rows", "acceptance", "no row sdpa_audit"),
    ("target.too_low", "baseline", "0.005%"),
    ("plausible.mfu", "baseline", "852 tok/s, is 0.1% of the peak"),
    ("target.too_low", "baseline", "22 times the target"),
    ("plausible.sequence_length", "baseline", "at S=1024 and 847 at S=2048"),
    ("phase.not_passed", "v2_parity", "gaps failed"),
    ("control.not_reproduced", "fused_adamw", "568"),
]


@pytest.mark.parametrize(("rule", "phase", "fact"), NAMED)
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
    text = Path(__file__).with_name("honest_report.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return data


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


BASE = "phases/baseline/results/0"


@pytest.mark.parametrize(
    ("path", "value", "rule", "verdict"),
    [
        ("acceptance/min_toks_per_s", 200_000, "acceptance.throughput", Verdict.NO_GO),
        ("acceptance/min_toks_per_s", 50_000, "target.too_low", Verdict.INCOMPLETE),
        ("scored/1/row", "compression", "acceptance.rows", Verdict.INCOMPLETE),
        ("phases/long_run/status", "timed_out", "phase.not_passed", Verdict.INCOMPLETE),
        ("phases/v2_parity/failed", ["gaps"], "phase.not_passed", Verdict.NO_GO),
        ("phases/nvtx/not_run", ["range"], "phase.not_passed", Verdict.INCOMPLETE),
        ("env", {}, "config.sequential_prefill", Verdict.INCOMPLETE),
        (f"{BASE}/csv", "", "window.no_provenance", Verdict.INCOMPLETE),
        (f"{BASE}/launches", [300e3, 301e3, 299e3], "scaling.not_shown", Verdict.INCOMPLETE),
        (f"{BASE}/launches", [102e3, 101e3, 103e3], "scaling.not_shown", Verdict.NO_GO),  # 0.64
        ("phases/bucket_sweep/chosen", "25", "choice.not_shown", Verdict.INCOMPLETE),
        ("claimed_verdict", "FAILED (NaN)", "claim.not_passed", Verdict.NO_GO),
        ("phases/long_run/claim", "diverged at step 80", "claim.not_passed", Verdict.NO_GO),
        (f"{BASE}/launches", [102e3, 98e3, 99e3], "acceptance.throughput", Verdict.NO_GO),
        ("scored", [], "acceptance.rows", Verdict.INCOMPLETE),
        ("scored/0/value", 305e3, "acceptance.value", Verdict.INCOMPLETE),
        ("machine/peak_tflops", 0.3, "plausible.mfu", Verdict.INCOMPLETE),
    ],
)
def test_one_change_breaks_one_rule(path: str, value: object, rule: str, verdict: Verdict) -> None:
    judgement = judge(spoil(path, value))
    assert judgement.verdict is verdict
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


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("acceptance/config", "prodction"), "unknown config"),
        ((f"{BASE}/launches", [1.0, -1.0]), "finite and above 0"),
        (("phases/warp", {"status": "completed"}), "phases.warp"),
        (("tittle", "x"), "did you mean 'title'"),
    ],
)
def test_bad_values(change: tuple[str, object], says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(spoil(*change)))
    with pytest.raises(UsageError) as caught:
        load_report(str(path))
    assert says in str(caught.value)


def test_a_name_that_is_no_report() -> None:
    with pytest.raises(UsageError, match="did you mean 'report_v4'"):
        load_report("report_v")
