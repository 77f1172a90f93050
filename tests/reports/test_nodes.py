"""Nodes that rows and ends of launches name: in `nodes.json`, on the pages, with the command."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from runbook.engine.derive import render
from runbook.launch.launcher_api import launcher
from runbook.records import Check, Confidence, LaunchStatus, Outcome, Reason, RunRecord, Verdict
from runbook.records.run import TAKES_OUT
from tests.reports.samples import baseline, entry, go, measured, no_go, run

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
