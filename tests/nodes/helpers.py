"""Launches of the fake trainer on two nodes, one rank on each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from runbook.engine.verify import verify_run
from runbook.folder import run_folders
from runbook.folder.manifest import folder_problems, load_record
from runbook.launch import adopt_launch
from runbook.launch.kubernetes import KubernetesCluster
from runbook.launch.kubernetes.manifests import Request, read_pod
from runbook.launch.nodes import NodesLauncher
from runbook.launch.nodes.files import JOB_JSON, NODE_TOKEN_VARIABLE
from runbook.launch.observer import Observer
from runbook.launch.slurm import SlurmCluster
from runbook.launch.supervision import LaunchOptions
from runbook.launch.watch.watchdog import Budgets
from runbook.process import carriers
from runbook.records import Launch, LaunchResult
from tests.factory.records import launch
from tests.launch.helpers import FAKE, run

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


def processes_of(run_dir: Path, node: str) -> list[psutil.Process]:
    """Everything that the agent of a node started."""
    token = json.loads((run_dir / JOB_JSON).read_text())["run_token"]
    found = carriers(f"{token}.{node}", NODE_TOKEN_VARIABLE)
    return [one for one in psutil.process_iter() if one.pid in found]


def two_ranks(*words: str, steps: int = 20) -> Launch:
    argv = ("python", FAKE, "--steps", str(steps), "--nproc", "2", *words)
    return launch(*argv, name="one", nodes=2, steps=steps, timeout_s=240)


@dataclass(kw_only=True)
class Place:
    """A cluster of two nodes, and how launches are started there."""

    kind: str
    cluster: Any = None
    pod: Path = Path()

    @property
    def last(self) -> str:
        """Its second node, which has rank 1."""
        return "n1" if self.kind == "slurm" else "k1"

    def launcher(
        self, root: Path, *, queue_s: float = 240, notes: Notes | None = None, partition: str = ""
    ) -> NodesLauncher:
        told, made = notes or Notes(), SlurmCluster(partition=partition)
        if self.kind == "kubernetes":
            request = Request(pod=read_pod(self.pod), gpus=0, queue_s=queue_s)
            made = KubernetesCluster(request=request)
        return NodesLauncher(run_root=root, cluster=made, queue_s=queue_s, note=told.note)

    def run(self, launch: Launch, root: Path, **options: object) -> LaunchResult:
        """Run it with short budgets and no retry; nothing with its token is left."""
        return run(launch, root, **({"budgets": FAST, "launcher": self.launcher(root)} | options))

    def adopted(self, launch: Launch, root: Path, notes: Notes) -> LaunchResult | None:
        where = self.launcher(root, notes=notes)
        how = LaunchOptions(run_root=root, observer=notes, retry=False, launcher=where)
        return adopt_launch(launch, how)


_HARNESS = """
import sys
from pathlib import Path
from runbook.records import Launch
from tests.nodes.helpers import Place
kind, pod, launch, root = sys.argv[1:]
Place(kind=kind, pod=Path(pod)).run(Launch.model_validate_json(launch), Path(root))
"""


def killed_while_it_trains(place: Place, launch: Launch, root: Path) -> Path:
    """The run directory of a launch whose harness got SIGKILL."""
    words = (place.kind, str(place.pod), launch.model_dump_json(), str(root))
    run_dir = root / launch.run_dir
    harness = subprocess.Popen(
        [sys.executable, "-c", _HARNESS, *words], cwd=Path(__file__).parents[2]
    )
    _kill(harness, lambda: (run_dir / "training.csv").exists())
    return run_dir


def _kill(harness: subprocess.Popen[bytes], trains: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not trains() and time.monotonic() < deadline and harness.poll() is None:
        time.sleep(0.05)
    assert harness.poll() is None, "it ended before it was to be killed"
    harness.send_signal(signal.SIGKILL)
    harness.wait()


def killed_in_the_middle(folder: Path, environment: dict[str, str], *words: str) -> Path:
    """A run whose harness got SIGKILL while the launch of the baseline trained."""
    harness = subprocess.Popen(
        [sys.executable, "-P", "-m", "runbook", "run", *words],
        cwd=folder,
        env=os.environ | environment,
        stderr=subprocess.DEVNULL,
    )
    trains = "artifacts/*/baseline/run1/training.csv"
    _kill(harness, lambda: bool(list(folder.glob(trains))))
    (run_root,) = run_folders(folder / "artifacts")
    return run_root


def check_on_one_and_two_nodes(run_root: Path, record: dict[str, Any]) -> None:
    """Its launches were on one node or on two, nothing of them is alive, every number holds."""
    entries = [entry for phase in record["phases"] for entry in phase["launches"]]
    assert {entry["launch"].get("nodes", 1) for entry in entries} == {1, 2}
    for entry in entries:
        assert carriers(entry["result"]["run_token"]) == []
    assert folder_problems(run_root, load_record(run_root)) == []
    assert verify_run(run_root).differences == ()
