"""The launcher of Kubernetes: a Job for each launch, an Indexed one with a Service over several.

Code belongs here if it talks to kubectl or knows of pods. No real cluster has run it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

from runbook import FILE_AFTER
from runbook.config.profile import Profile
from runbook.config.setup import RunOptions, Setup
from runbook.errors import UsageError
from runbook.files import write_atomic
from runbook.launch.command import completed, rendezvous
from runbook.launch.inputs import RefusedError
from runbook.launch.kubernetes.cluster import KubernetesCluster
from runbook.launch.kubernetes.manifests import PodFile, Request, read_pod
from runbook.launch.launcher_api import Launcher, LauncherKind
from runbook.launch.nodes import NodesLauncher, gpus_per_node, problems_of
from runbook.records import Launch
from runbook.records.launch import TORCHRUN

# The copy of the pod file that a run began with.
KEPT_POD = "pod.yaml"
_PORT = 29400
_NEEDS = ("create jobs.batch", "delete jobs.batch", "list pods", "create services")


class Kubernetes(LauncherKind):
    """Jobs of Kubernetes, as `--launcher kubernetes:POD.yaml` names them."""

    reads = ("--nodes", "--queue-s", FILE_AFTER)

    def __init__(self, path: str = "") -> None:
        self.path = path

    def lacks(self) -> list[str]:
        """As in `LauncherKind`: kubectl, what it may do, and the claims of the pod."""
        if shutil.which("kubectl") is None:
            return ["--launcher kubernetes: no kubectl here"]
        try:
            pod = self._pod()
            kubectl = KubernetesCluster(request=Request(pod=pod, gpus=0, queue_s=0))
            denied = [words for words in _NEEDS if not kubectl.may(*words.split())]
            absent = [claim for claim in pod.claims() if not kubectl.has_claim(claim)]
        except UsageError:
            return []  # told with the options
        except RefusedError as error:
            return [f"--launcher kubernetes: {error}"]
        where = f"in the namespace {pod.metadata.namespace or 'of the context'}"
        return [
            *(f"--launcher kubernetes: you may not {words} {where}" for words in denied),
            *(f"{self.path}: there is no volume claim {claim} {where}" for claim in absent),
        ]

    def problems(self, options: RunOptions, profile: Profile) -> list[str]:
        """As in `LauncherKind`."""
        found = problems_of(self, "kubernetes", options, profile)
        try:
            unfit = self._pod().unfit(Path(options.out), gpus_per_node(options, profile))
        except UsageError as error:
            return found + list(error.problems)
        return found + [f"{self.path}: {text}" for text in unfit]

    def launcher(self, setup: Setup, run_root: Path, note: Callable[[str], None]) -> Launcher:
        """As in `LauncherKind`. A run goes on with the pod that it began with."""
        kept = run_root / KEPT_POD
        if not kept.is_file():
            write_atomic(kept, Path(self.path).read_text("utf-8"))
        request, queue_s = _request(read_pod(kept), setup), setup.options.queue_s
        cluster = KubernetesCluster(request=request)
        return NodesLauncher(run_root=run_root, cluster=cluster, queue_s=queue_s, note=note)

    def printed(self, launch: Launch, setup: Setup) -> str:
        """As in `LauncherKind`: its manifests, with torchrun alone for the agent."""
        whole, request, name = completed(launch), _request(self._pod(), setup), "runbook"
        words = list(whole.words())
        if words[0] == TORCHRUN and launch.nodes > 1:
            words[1:1] = rendezvous(f"{name}-0.{name}:{_PORT}", name)
        documents = [request.job(whole, name, words, whole.env)]
        documents += [request.service(name)] if launch.nodes > 1 else []
        apart = json.loads(json.dumps(documents))  # what stands twice is written twice
        text = yaml.safe_dump_all(apart, sort_keys=False, width=1 << 20)
        return f"kubectl apply -f - <<'JOB'\n{text}JOB"

    def takes_out(self) -> str:
        """As in `LauncherKind`."""
        return "kubectl cordon {node}"

    def _pod(self) -> PodFile:
        if not self.path:
            raise UsageError(
                f"--launcher kubernetes: name the pod to run in, kubernetes{FILE_AFTER}POD.yaml"
            )
        return read_pod(Path(self.path))


def _request(pod: PodFile, setup: Setup) -> Request:
    gpus = gpus_per_node(setup.options, setup.profile)
    return Request(pod=pod, gpus=gpus, queue_s=setup.options.queue_s)
