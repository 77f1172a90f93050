"""What every report must say, whatever the record holds, and which nodes it names and why."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from reports.view import build_view
from runbook.config import registry
from runbook.engine import derive
from runbook.engine.derive import render
from runbook.launch.launcher_api import launcher
from runbook.records import (
    Check,
    Confidence,
    LaunchStatus,
    Outcome,
    PhaseRecord,
    Reason,
    RunRecord,
    Verdict,
    judge_run,
)
from runbook.records.run import TAKES_OUT
from tests.factory.records import check, phase
from tests.reports.samples import GOLDEN, SAMPLES, baseline, entry, go, measured, no_go, run
from tests.tiers import examples

IDS = st.from_regex(r"[a-z0-9_]{1,8}\.[a-z0-9_]{1,8}", fullmatch=True)


def make_check(name: str, outcome: Outcome) -> Check:
    code = Reason.OK if outcome is Outcome.PASS else Reason.NOT_RUN
    return check(name, outcome, code, reason="because", required=True)


def record_of(outcomes: dict[str, Outcome], lost: set[str]) -> RunRecord:
    phases: dict[str, list[Check]] = {}
    for name, outcome in outcomes.items():
        phases.setdefault(name.partition(".")[0], []).append(make_check(name, outcome))
    records = tuple(
        PhaseRecord(name=name, title=name, source="", outcome=checks[0].outcome, checks=checks)
        for name, checks in phases.items()
    )
    required = (*outcomes, *(lost - set(outcomes)))
    verdict = judge_run([check for phase in records for check in phase.checks], required)
    return run(verdict, records, required=required, reasons=())


@examples(40)
@given(st.dictionaries(IDS, st.sampled_from(Outcome), max_size=6), st.sets(IDS, max_size=3))
def test_every_required_id_is_in_every_format(outcomes: dict[str, Outcome], lost: set[str]) -> None:
    """All but the first page, which counts what passed and tells each cause of the others.

    Annotations, too, are of problems only, and nodes.json is of nodes.
    """
    record = record_of(outcomes, lost)
    for fmt in registry.names(registry.REPORT_GROUP):
        text = derive.render(record, fmt)
        for name in record.required if fmt not in ("md", "github", "nodes") else ():
            assert name in text, (fmt, name)
    view = build_view(record)
    page = derive.render(record, "md")
    assert view.tally in page
    assert all(cause.lead.id in page for cause in view.causes)


@pytest.mark.parametrize("fmt", ["md", "details", "html", "terminal"])
def test_checks_that_passed_and_warn_are_named(fmt: str) -> None:
    warn = [check(f"baseline.{name}", code=Reason.WARNING) for name in "abcde"]
    page = derive.render(go().model_copy(update={"phases": (phase("baseline", *warn),)}), fmt)
    assert "5 warn: baseline.a, baseline.b, baseline.c and 2 more" in page
    assert " warn: " not in derive.render(go(), fmt)


@pytest.mark.parametrize("fmt", ["details", "html"])
def test_a_run_that_requires_nothing_says_so(fmt: str) -> None:
    record = run(Verdict.INCOMPLETE, (), required=(), reasons=())
    assert "requires nothing" in derive.render(record, fmt)


def test_a_launch_that_was_stopped_is_not_forbidden_to_go_on() -> None:
    ended = {"verdict": Verdict.INCOMPLETE, "interrupted": True}
    stopped = go().model_copy(update={**ended, "options": {**go().options, "plan": "production"}})
    assert "it can go on" in derive.render(stopped, "md")
    for record in (
        stopped.model_copy(update={"interrupted": False}),
        go().model_copy(update=ended),
    ):
        assert "Do not start the production run" in derive.render(record, "md")


@pytest.mark.parametrize("fmt", ["md", "details", "html", "junit", "terminal"])
def test_a_run_that_never_ended_is_called_unfinished(fmt: str) -> None:
    dead = go().model_copy(update={"finished_at": None, "verdict": Verdict.INCOMPLETE})
    assert "Unfinished" in derive.render(dead, fmt)


def test_write_renders_all_before_it_touches_any_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.md").write_text("old")
    real = derive.render

    def render(record: RunRecord, name: str) -> str:
        if name == registry.names(registry.REPORT_GROUP)[-1]:
            raise RuntimeError("it cannot be rendered")
        return real(record, name)

    monkeypatch.setattr(derive, "render", render)
    with pytest.raises(RuntimeError):
        derive.write_reports(go(), tmp_path)
    assert (tmp_path / "report.md").read_text() == "old"


@pytest.mark.parametrize("address", ["http:", "https:", "//cdn", "url(", "@import", "src="])
def test_nothing_is_fetched(address: str) -> None:
    assert address not in render(go(), "html")


@pytest.mark.parametrize(
    ("name", "fmt"),
    [(name, fmt) for name in SAMPLES for fmt in registry.names(registry.REPORT_GROUP)],
)
def test_report_is_exactly_the_golden_one(name: str, fmt: str) -> None:
    expected = (GOLDEN / name / registry.report_files()[fmt]).read_text(encoding="utf-8")
    assert render(SAMPLES[name](), fmt) == expected


# `ctrf.json` is the form that https://ctrf.io describes, and is green where the run is.

# What the format demands, and of what it allows the names that a run has.
FORM = json.loads(Path(__file__).with_name("ctrf.schema.json").read_text(encoding="utf-8"))
_STATUS = ("passed", "failed", "skipped", "pending", "other")


@pytest.mark.parametrize("name", SAMPLES)
def test_it_has_the_form_and_says_what_junit_says(name: str) -> None:
    record = SAMPLES[name]()
    document = json.loads(render(record, "ctrf"))
    Draft7Validator(FORM).validate(document)
    tests, summary = document["results"]["tests"], document["results"]["summary"]
    assert {**dict.fromkeys(_STATUS, 0), **Counter(test["status"] for test in tests)} == {
        status: summary[status] for status in _STATUS
    }
    cases = ET.fromstring(render(record, "junit")).findall(".//testcase")
    assert [test["name"] for test in tests] == [case.get("name") for case in cases]
    red = [case.get("name") for case in cases if {one.tag for one in case} & {"failure", "error"}]
    assert [test["name"] for test in tests if test["status"] == "failed"] == red
    began = datetime.fromisoformat(record.started_at).astimezone(UTC).timestamp()
    assert summary["start"] == began * 1000 <= summary["stop"]


TAGS = {Outcome.PASS: "", Outcome.FAIL: "failure", Outcome.SKIPPED: "skipped"}


@pytest.mark.parametrize("outcome", Outcome)
def test_only_a_pass_passes_and_no_answer_is_red(outcome: Outcome) -> None:
    record = record_of({"a.b": outcome}, set())
    check, verdict = json.loads(render(record, "ctrf"))["results"]["tests"]
    wanted = {Outcome.PASS: "passed", Outcome.SKIPPED: "skipped"}.get(outcome, "failed")
    assert (check["status"], check["rawStatus"]) == (wanted, outcome.value)
    green = record.verdict is Verdict.GO
    assert (verdict["name"], verdict["status"] == "passed") == ("verdict", green)
    (case,) = ET.fromstring(render(record, "junit")).findall(".//testcase[@name='a.b']")
    assert "".join(one.tag for one in case if one.tag != "properties") == TAGS.get(outcome, "error")


def test_a_run_that_did_not_end_and_a_time_that_is_none_have_a_document() -> None:
    for start, end in (("2026-01-31T12:00:00Z", None), ("yesterday", "today")):
        record = go().model_copy(update={"started_at": start, "finished_at": end})
        summary = json.loads(render(record, "ctrf"))["results"]["summary"]
        assert summary["start"] == summary["stop"]


TEMPLATE = launcher("slurm").takes_out()


def accusing(what: str, nodes: tuple[str, ...], sure: Confidence, **fields: Any) -> Check:
    base = no_go().phases[1].checks[0]
    changes = {"id": f"baseline.{what}", "nodes": nodes, "confidence": sure, "measurement": None}
    changes |= {"outcome": Outcome.INVALID, "code": Reason.WRONG_ENVIRONMENT, "limit": None}
    return Check.model_validate(base.model_dump() | changes | fields)


SLOW = accusing(
    "slow_node", ("n3",), Confidence.CONFIRMED, reason="slow: n3 (all together 0.5 GB/s)",
    evidence=("preflight/without_4/ceilings.json",),
    measurement=measured(0.5, "GB/s", "preflight/ceilings/all_reduce"),
)  # fmt: skip
UNLIKE = accusing(
    "nodes_alike", ("n1", "n3"), Confidence.REPORTED, reason="driver: n1, n3 have 550.1",
    evidence=("host.json",),
)  # fmt: skip
LATE = entry("baseline", "run1", node="n5", notes=("straggler: rank 5 on node n5 comes late",))
LOST = entry(
    "baseline", "run2", node="n1", status=LaunchStatus.HARDWARE_ERROR, cause="node n1 is lost",
    evidence=("baseline/run2/console.log",),
)  # fmt: skip


def record(*, template: str = TEMPLATE) -> RunRecord:
    phase = baseline(SLOW).model_copy(update={"checks": (UNLIKE, SLOW), "launches": (LATE, LOST)})
    told = {**go().environment, **({TAKES_OUT: template} if template else {})}
    return run(Verdict.INCOMPLETE, (phase,), environment=told)


def nodes_of(one: RunRecord) -> dict[str, dict[str, Any]]:
    document = json.loads(render(one, "nodes"))
    assert (document["run"], document["verdict"]) == (one.run_id, one.said)
    assert document["reasons"] == list(one.reasons)
    return {told["node"]: told for told in document["nodes"]}


def test_each_node_is_there_once_with_the_surest_that_is_said_of_it() -> None:
    found = nodes_of(record())
    assert {name: told["confidence"] for name, told in found.items()} == {
        "n3": "confirmed", "n1": "reported", "n5": "suspected",
    }  # fmt: skip
    assert list(found) == ["n3", "n1", "n5"]
    assert found["n3"]["reason"] == "baseline.slow_node: slow: n3 (all together 0.5 GB/s)"
    assert found["n3"]["also"] == ["baseline.nodes_alike: driver: n1, n3 have 550.1"]
    assert found["n3"]["evidence"] == ["preflight/without_4/ceilings.json", "host.json"]
    (number,) = found["n3"]["numbers"]
    assert (number["value"], number["unit"]) == (0.5, "GB/s")
    assert found["n1"]["also"] == ["baseline/run2: node n1 is lost"]
    # A launch that ended well keeps no files as evidence but how it ended.
    assert found["n5"]["evidence"] == ["baseline/run1/result.json"]
    assert found["n5"]["reason"].startswith("baseline/run1: straggler:")


def test_the_command_is_the_launchers_and_one_word_stays_one() -> None:
    words = shlex.split(nodes_of(record())["n3"]["command"])
    assert words == [
        *("scontrol", "update", "nodename=n3", "state=drain"),
        f"reason=baseline.slow_node of runbook {record().run_id}",
    ]
    hostile = SLOW.model_copy(update={"nodes": ("n3; rm -rf {reason}",)})
    phase = baseline(hostile)
    one = run(Verdict.INCOMPLETE, (phase,), environment={**go().environment, TAKES_OUT: TEMPLATE})
    (found,) = nodes_of(one).values()
    assert shlex.split(found["command"])[2] == "nodename=n3; rm -rf {reason}"
    # A run that does not say how has no command; one machine's launcher has none.
    assert nodes_of(record(template=""))["n3"]["command"] == ""
    assert launcher("local").takes_out() == ""


@pytest.mark.parametrize("fmt", ["md", "html", "terminal"])
def test_the_pages_show_node_confidence_and_command(fmt: str) -> None:
    text = render(record(), fmt).replace("&#39;", "'")
    for node, told in nodes_of(record()).items():
        assert node in text and told["confidence"] in text and told["command"] in text
    assert "scontrol" not in render(go(), fmt) and nodes_of(go()) == {}
