"""The whole CPU plan on two nodes, by the command, though its harness is killed in the middle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.shell import runbook
from tests.slurm.cluster import Cluster
from tests.slurm.helpers import check_on_one_and_two_nodes, killed_in_the_middle

# Thirteen launches with all their steps, beside other tests.
pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1500)]

WORDS = ("--profile", "cpu", "--launcher", "slurm", "--nodes", "2")


def test_the_whole_plan_says_go_though_its_harness_was_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    run_root = killed_in_the_middle(tmp_path, cluster.environment, *WORDS)
    left = json.loads((run_root / "baseline/run1/job.json").read_text())
    done = runbook(
        "run", "--resume", run_root.name, cwd=tmp_path, timeout_s=900, **cluster.environment
    )
    assert f"job {left['job_id']} outlived its harness" in done.err
    assert done.code == 0, done.out
    record = json.loads((run_root / "run.json").read_text())
    assert record["verdict"] == "GO"
    assert "2 ranks on CPU over 2 nodes" in record["scope"]
    assert not any("CUT OFF" in text for text in record["caveats"])
    assert {"preflight.nodes", "preflight.nodes_alike"} <= set(record["required"])
    check_on_one_and_two_nodes(run_root, record)
