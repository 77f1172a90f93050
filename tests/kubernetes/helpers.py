"""Launches of the fake trainer in the pods of a cluster, one rank in each."""

from __future__ import annotations

from pathlib import Path

from runbook.launch.kubernetes.cluster import KubernetesCluster
from runbook.launch.kubernetes.manifests import Request, read_pod
from runbook.launch.nodes import NodesLauncher
from runbook.records import Launch, LaunchResult
from tests.slurm.helpers import Notes, two_ranks
from tests.slurm.helpers import run as run_by

__all__ = ["Notes", "launcher", "run", "two_ranks"]


def launcher(
    pod: Path, root: Path, *, queue_s: float = 240, notes: Notes | None = None
) -> NodesLauncher:
    request = Request(pod=read_pod(pod), gpus=0, queue_s=queue_s)
    cluster = KubernetesCluster(request=request)
    note = (notes or Notes()).note
    return NodesLauncher(run_root=root, cluster=cluster, queue_s=queue_s, note=note)


def run(launch: Launch, pod: Path, root: Path, **options: object) -> LaunchResult:
    """Run it on the cluster with short budgets and no retry; nothing with its token is left."""
    return run_by(launch, root, **{"launcher": launcher(pod, root)} | options)
