"""A whole run on two nodes whose harness is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.shell import runbook
from tests.nodes.helpers import (
    Place,
    check_on_one_and_two_nodes,
    killed_in_the_middle,
)

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1500)]


@pytest.mark.parametrize(
    ("place", "words", "code"),
    [
        ("slurm", ("--launcher", "slurm"), 0),  # the whole CPU plan
        ("kubernetes", ("--launcher", "kubernetes:pod.yaml", "--phase", "preflight,baseline"), 4),
    ],
    indirect=["place"],
)
def test_a_run_passes_though_its_harness_was_killed(
    place: Place, tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    environment = place.cluster.environment
    asked = ("--profile", "cpu", "--nodes", "2", *words)
    run_root = killed_in_the_middle(tmp_path, environment, *asked)
    left = json.loads((run_root / "baseline/run1/job.json").read_text())
    if place.kind == "kubernetes":
        place.pod.unlink()  # it goes on with the pod that it began with
    done = runbook("run", "--resume", run_root.name, cwd=tmp_path, timeout_s=900, **environment)
    called = left["job_id"] or f"runbook-{left['run_token']}"
    assert f"job {called} outlived its harness" in done.err
    assert done.code == code, done.out
    record = json.loads((run_root / "run.json").read_text())
    assert record["verdict"] == {0: "GO", 4: "PARTIAL PASS"}[code]
    assert "2 ranks on CPU over 2 nodes" in record["scope"]
    assert not any("CUT OFF" in text for text in record["caveats"])
    asked_for = str(record["options"]["launcher"])
    assert asked_for == ("slurm" if place.kind == "slurm" else f"kubernetes:{place.pod}")
    rows = {check["id"]: check for phase in record["phases"] for check in phase["checks"]}
    nodes = {"preflight.nodes", "preflight.nodes_alike"}
    assert {rows[name]["outcome"] for name in nodes} == {"PASS"}
    assert nodes <= set(record["required"])
    check_on_one_and_two_nodes(run_root, record)
