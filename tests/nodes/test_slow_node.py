"""Eight nodes, of which the slow one is found: real slurmd, and its rank is stopped by hand."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from runbook.engine.verify import verify_run
from runbook.folder import run_folders
from tests.cli.shell import runbook
from tests.nodes.conftest import slurm_of
from tests.nodes.helpers import processes_of
from tests.nodes.slurm import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1500)]

NODES, SICK = 8, "n6"
# Eight ranks on two cores take 30 ms for an all-reduce of 4 MiB, the slow one half a second.
FLOOR_GB_S, STOPPED_S, RUNS_S = 0.03, 0.5, 0.02
PROFILE = f"""
extends: cpu
name: eight
title: 8 gloo ranks on CPUs
ranks: {NODES}
workload: {{global_batch: {NODES}}}
limits:
  ceiling_all_reduce_gb_s: {{value: {FLOOR_GB_S}, gated: true, source: a test}}
"""


# From the products on, so that the rank is held when the exchange begins: that takes half a second,
# and a machine with other work looks late.
HELD = ("matmul", "memory_copy", "host_copy", "all_reduce")


def measures(run_dir: Path, pid: int) -> str:
    """What the rank of this process said last that it measures."""
    for path in run_dir.glob("heartbeat_rank*.jsonl"):
        lines = path.read_text().splitlines()
        if lines and json.loads(lines[0])["pid"] == pid:
            begun = [line for line in lines if '"ceiling_start"' in line]
            with suppress(json.JSONDecodeError):
                return str(json.loads(begun[-1])["ceiling"]) if begun else ""
    return ""


@contextmanager
def held_up(folder: Path, node: str) -> Iterator[None]:
    """The rank on a node is stopped most of the time while gradients are exchanged."""
    over, ranks = threading.Event(), dict[Path, psutil.Process]()

    def hold() -> None:
        while not over.wait(RUNS_S):
            for job in folder.glob("artifacts/*/preflight/*/job.json"):
                run_dir = job.parent
                if (run_dir / "result.json").exists():
                    continue
                # Whatever is looked at may end meanwhile.
                with suppress(psutil.Error):
                    if run_dir not in ranks:
                        found = [one for one in processes_of(run_dir, node) if is_rank(one)]
                        ranks.update((run_dir, one) for one in found[:1])
                    elif measures(run_dir, ranks[run_dir].pid) in HELD:
                        ranks[run_dir].suspend()
                        time.sleep(STOPPED_S)
                        ranks[run_dir].resume()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        words = process.cmdline()
        return "nsa.ceilings" in words and not any("run" in word for word in words)
    return False


@pytest.fixture
def eight_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_of(tmp_path_factory.mktemp("slurm"), NODES) as cluster:
        yield cluster
        assert cluster.left() == []


def test_the_slow_one_of_eight_nodes_is_found_and_taken_out(
    eight_nodes: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "eight.yaml").write_text(PROFILE)
    words = ("--profile", "eight.yaml", "--launcher", "slurm", "--nodes", str(NODES))
    with held_up(tmp_path, SICK):
        done = runbook(
            "run", "--phase", "preflight", *words, cwd=tmp_path, timeout_s=900,
            **eight_nodes.environment,
        )  # fmt: skip
    (run_root,) = run_folders(tmp_path / "artifacts")
    record = json.loads((run_root / "run.json").read_text())
    (phase,) = (one for one in record["phases"] if one["name"] == "preflight")
    (check,) = (one for one in phase["checks"] if one["id"] == "preflight.slow_node")
    assert check["reason"].startswith(f"slow: {SICK} ("), (check["reason"], done.err)
    assert (check["outcome"], check["required"]) == ("INVALID", True)
    names = [entry["launch"]["name"] for entry in phase["launches"]]
    # log2(8) launches, and the one in which all others are well.
    assert names[-4:] == ["without_5_8", "without_7_8", "without_8", "without_7"], names
    assert names[-5] == "ceilings"
    assert verify_run(run_root).differences == ()

    (told,) = json.loads((run_root / "nodes.json").read_text())["nodes"]
    assert (told["node"], told["confidence"]) == (SICK, "confirmed")
    command = told["command"]
    assert command in done.out and command in (run_root / "report.md").read_text()
    # Nothing was done to the node; a person types the line.
    assert eight_nodes.states() == ["idle"] * NODES
    subprocess.run(command, shell=True, check=True, timeout=60)
    states = dict(zip(eight_nodes.names, eight_nodes.states(), strict=True))
    assert [name for name, state in states.items() if state.startswith("drain")] == [SICK]
    eight_nodes.tool("scontrol", "update", f"nodename={SICK}", "state=resume")
