"""Launches of the fake trainer on two nodes, one rank on each."""

from __future__ import annotations

from pathlib import Path

from runbook.launch import Budgets, LaunchOptions, run_launch
from runbook.launch.nodes import NodesLauncher
from runbook.launch.observer import Observer
from runbook.launch.slurm import Request, SlurmCluster
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
