"""Four ranks on four nodes, and one on the first of them."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_all_nodes_and_one_run_with_their_ranks(four_nodes: Cluster, tmp_path: Path) -> None:
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
    ran = {entry["launch"]["run_dir"]: run_root / entry["launch"]["run_dir"] for entry in entries}
    kept = json.loads((run_root / "slurm_nodes.json").read_text())["nodes"]
    assert sorted(kept) == list(four_nodes.names)
    for name, nodes, ranks in (("baseline/run1", 4, 4), ("single_gpu/run1", 1, 1)):
        env = json.loads((ran[name] / "env.json").read_text())
        assert (env["nodes"], env["world_size"]) == (nodes, ranks)
        assert sorted(path.name for path in (ran[name] / "nodes").iterdir()) == kept[:nodes]
    assert len(ran) == 2

    scaling = checks["single_gpu.scaling"]
    assert (scaling["outcome"], scaling["code"]) == ("SKIPPED", "not_gated")
    assert scaling["reason"].endswith("measured: one rank on 1 node and 4 ranks on 4")
    assert verify_run(run_root).differences == ()
