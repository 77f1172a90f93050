"""Launches of the fake trainer on two nodes, one rank on each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from runbook.engine.verify import verify_run
from runbook.folder import run_folders
from runbook.folder.manifest import check_manifest
from runbook.launch import Budgets, LaunchOptions, run_launch
from runbook.launch.nodes import NodesLauncher
from runbook.launch.observer import Observer
from runbook.launch.slurm.cluster import Request, SlurmCluster
from runbook.process.reaper import carriers
from runbook.records import Launch, LaunchResult
from tests.factory.records import launch

ONE_RANK = str(Path(__file__).with_name("one_rank.py"))
# Files take longer than pipes, and a start on two nodes takes two interpreters.
FAST = Budgets(
    init_s=60, first_step_s=60, data_s=3.0, step_s=3.0, eval_s=60, checkpoint_s=60, silence_s=60
)


class Notes(Observer):
    """Keeps what a person should read."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def two_ranks(*words: str, steps: int = 20) -> Launch:
    argv = ("python", ONE_RANK, "--steps", str(steps), "--nproc", "2", *words)
    return launch(*argv, name="one", nodes=2, steps=steps, timeout_s=240)


def launcher(
    root: Path, *, queue_s: float = 240, notes: Notes | None = None, partition: str = ""
) -> NodesLauncher:
    told, cluster = notes or Notes(), SlurmCluster(request=Request(partition=partition))
    return NodesLauncher(run_root=root, cluster=cluster, queue_s=queue_s, note=told.note)


def run(launch: Launch, root: Path, **options: object) -> LaunchResult:
    """Run it on the cluster with short budgets and no retry; nothing with its token is left."""
    fields: dict[str, object] = {"budgets": FAST, "retry": False, "observer": Observer()}
    fields["launcher"] = launcher(root)
    result = run_launch(launch, LaunchOptions(run_root=root, **fields | options))  # type: ignore[arg-type]
    assert carriers(result.run_token) == []
    return result


def killed_in_the_middle(folder: Path, environment: dict[str, str], *words: str) -> Path:
    """A run whose harness got SIGKILL while the launch of the baseline trained."""
    harness = subprocess.Popen(
        [sys.executable, "-P", "-m", "runbook", "run", *words],
        cwd=folder,
        env=os.environ | environment,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and harness.poll() is None:
        found = list(folder.glob("artifacts/*/baseline/run1/training.csv"))
        if found:
            break
        time.sleep(0.1)
    assert harness.poll() is None, "the run ended before its baseline"
    harness.send_signal(signal.SIGKILL)
    harness.wait()
    (run_root,) = run_folders(folder / "artifacts")
    return run_root


def check_on_one_and_two_nodes(run_root: Path, record: dict[str, Any]) -> None:
    """Its launches were on one node or on two, nothing of them is alive, every number holds."""
    entries = [entry for phase in record["phases"] for entry in phase["launches"]]
    assert {entry["launch"].get("nodes", 1) for entry in entries} == {1, 2}
    for entry in entries:
        assert carriers(entry["result"]["run_token"]) == []
    assert check_manifest(run_root) == []
    assert verify_run(run_root).differences == ()
