"""Preflight and a phase in the pods of two nodes, by the command, though its harness is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.shell import runbook
from tests.kubernetes.cluster import Cluster
from tests.slurm.helpers import check_on_one_and_two_nodes, killed_in_the_middle

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]

WORDS = ("--profile", "cpu", "--phase", "preflight,baseline")


def test_a_run_passes_though_its_harness_was_killed(
    cluster: Cluster, pod: Path, tmp_path: Path
) -> None:
    where = ("--launcher", "kubernetes:pod.yaml", "--nodes", "2")
    run_root = killed_in_the_middle(tmp_path, cluster.environment, *WORDS, *where)
    pod.unlink()  # it goes on with the pod that it began with
    left = json.loads((run_root / "baseline/run1/job.json").read_text())
    done = runbook("run", "--resume", run_root.name, cwd=tmp_path, timeout_s=600)
    assert f"job runbook-{left['run_token']} outlived its harness" in done.err
    assert done.code == 4, done.out
    record = json.loads((run_root / "run.json").read_text())
    assert "2 ranks on CPU over 2 nodes" in record["scope"]
    rows = {check["id"]: check for phase in record["phases"] for check in phase["checks"]}
    assert {rows[f"preflight.{name}"]["outcome"] for name in ("nodes", "nodes_alike")} == {"PASS"}
    assert record["options"]["launcher"] == f"kubernetes:{pod}"
    check_on_one_and_two_nodes(run_root, record)
