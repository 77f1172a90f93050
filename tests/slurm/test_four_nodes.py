"""Four ranks on four nodes, and on fewer of them: each number of nodes really has its ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runbook.engine.verify import verify_run
from runbook.folder import run_folders
from runbook.process.reaper import carriers
from tests.cli.shell import runbook
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PROFILE = """
extends: cpu
name: four
title: 4 gloo ranks on CPUs
ranks: 4
workload: {global_batch: 4}
phases:
  baseline: {launches: 1, steps: 12, config_overrides: {train.batch_size: 4}}
  single_gpu: {launches: 1, steps: 12, config_overrides: {train.batch_size: 4}}
"""


def test_every_number_of_nodes_runs_with_its_ranks_on_the_first_nodes(
    four_nodes: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "four.yaml").write_text(PROFILE)
    words = ("--profile", "four.yaml", "--launcher", "slurm", "--nodes", "4")
    done = runbook(
        "run", "--phase", "baseline,single_gpu", *words, cwd=tmp_path, **four_nodes.environment
    )
    (run_root,) = run_folders(tmp_path / "artifacts")
    record = json.loads((run_root / "run.json").read_text())
    checks = {check["id"]: check for phase in record["phases"] for check in phase["checks"]}
    wrong = [
        f"{check['id']}: {check['reason']}"
        for check in checks.values()
        if check["outcome"] not in ("PASS", "SKIPPED")
    ]
    assert not wrong, done.err

    entries = [entry for phase in record["phases"] for entry in phase["launches"]]
    for entry in entries:
        assert carriers(entry["result"]["run_token"]) == []
    ran = {entry["launch"]["name"]: run_root / entry["launch"]["run_dir"] for entry in entries[1:]}
    kept = json.loads((run_root / "slurm_nodes.json").read_text())["nodes"]
    assert sorted(kept) == list(four_nodes.names)
    for name, nodes, ranks in (("run1", 1, 1), ("share1", 1, 1), ("nodes2_1", 2, 2)):
        env = json.loads((ran[name] / "env.json").read_text())
        assert (env["nodes"], env["world_size"]) == (nodes, ranks)
        assert sorted(path.name for path in (ran[name] / "nodes").iterdir()) == kept[:nodes]
    assert len(ran) == 3

    scaling = checks["single_gpu.node_scaling"]
    assert (scaling["outcome"], scaling["code"]) == ("SKIPPED", "not_gated")
    assert scaling["measurement"]["value"] > 0
    assert "single_gpu.node_scaling" not in record["required"]
    rows = _table(record)["rows"]
    assert [(row[0], row[1]) for row in rows] == [(1, 1), (2, 2), (4, 4)]
    assert all(row[2] > 0 for row in rows)
    assert "Throughput by number of nodes" in (run_root / "details.md").read_text()
    assert verify_run(run_root).differences == ()


def _table(record: dict[str, Any]) -> dict[str, Any]:
    (phase,) = (one for one in record["phases"] if one["name"] == "single_gpu")
    found: dict[str, Any] = phase["tables"][0]
    assert found["title"] == "Throughput by number of nodes"
    return found
