"""The launcher of Kubernetes: a Job for each launch, an Indexed one over several nodes.

Code belongs here if it talks to kubectl, which makes a job, asks about it, and removes it. No real
cluster has run it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from runbook import FILE_AFTER
from runbook.config import Profile
from runbook.config.settings import is_passed_on
from runbook.config.setup import RunOptions, Setup
from runbook.errors import UsageError
from runbook.files import write_atomic
from runbook.launch.command import RefusedError, completed, rendezvous
from runbook.launch.kubernetes.manifests import (
    ADDRESS_VARIABLE,
    LABEL,
    NODE_VARIABLE,
    PodFile,
    Request,
    read_pod,
)
from runbook.launch.launcher_api import Start
from runbook.launch.nodes import (
    RENDEZVOUS_PORT,
    Cluster,
    NodesKind,
    Standing,
    agent,
    gpus_per_node,
)
from runbook.launch.nodes.agent import Place
from runbook.launch.nodes.files import Job
from runbook.process import ToolResult, run_tool
from runbook.records import End, Kind, Launch, LaunchStatus
from runbook.records.launch import TORCHRUN

_TIMEOUT_S = 20.0
_LONGEST = 300
# Why a pod is removed though nobody asked: its node is gone, or must be left.
_NODE_GONE = ("DeletionByTaintManager", "DeletionByPodGC")
# By the Job controller, in the pods of a Job with an index.
_INDEX = "JOB_COMPLETION_INDEX"
# Less than the grace of a pod; an eviction is told by the pod alone, as long as it is there.
_LINGERS_S = 5.0


def _words(done: ToolResult) -> str:
    return " ".join(done.stderr.split())[:_LONGEST] or done.problem or done.stdout


def _reason(told: Mapping[str, Any]) -> str:
    """Reason and message, as far as they are given."""
    return ": ".join(str(told[key]) for key in ("reason", "message") if told.get(key))


def _condition(document: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The condition of this type; empty if there is none."""
    told = document.get("status", {}).get("conditions") or ()
    return next((one for one in told if one["type"] == kind), {})


def _holds(document: Mapping[str, Any], *kinds: str) -> Mapping[str, Any]:
    """The first condition of these that is true; empty if none is."""
    found = (_condition(document, kind) for kind in kinds)
    return next((one for one in found if one.get("status") == "True"), {})


def _container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of the trainer's container, such as `{"running": ...}`."""
    name = pod["spec"]["containers"][0]["name"]
    told = pod.get("status", {}).get("containerStatuses") or ()
    return next((one["state"] for one in told if one["name"] == name), {})


@dataclass(frozen=True, kw_only=True)
class JobState:
    """A job and its pods as the cluster tells of them: `Standing` of the launcher.

    `event` is the last warning about a job without pods; `logs` gives a pod's last line.
    """

    job: Mapping[str, Any]
    pods: tuple[Mapping[str, Any], ...]
    nodes: int
    event: str = ""
    logs: Callable[[str], str] = lambda _: ""

    @property
    def over(self) -> bool:
        """As in `Standing`: done with, being removed, or a pod of it is."""
        done = _holds(self.job, "Complete", "Failed", "FailureTarget", "SuccessCriteriaMet")
        failed = [pod for pod in self.pods if pod["status"].get("phase") == "Failed"]
        return bool(done or failed or self._is_removed)

    @property
    def _is_removed(self) -> bool:
        every = (self.job, *self.pods)
        return any("deletionTimestamp" in one.get("metadata", {}) for one in every)

    @property
    def waits(self) -> bool:
        """As in `Standing`: until the container runs on every node."""
        begun = [pod for pod in self.pods if {"running", "terminated"} & _container(pod).keys()]
        return not self.over and len(begun) < self.nodes

    @property
    def why(self) -> str:
        """As in `Standing`."""
        found = [text for pod in self.pods if (text := self._why(pod))]
        suspended = _reason(_holds(self.job, "Suspended"))
        return "; ".join(found) or suspended or self.event or "Kubernetes gives no reason"

    def _why(self, pod: Mapping[str, Any]) -> str:
        scheduled = _condition(pod, "PodScheduled")
        if scheduled.get("status") == "False":
            return _reason(scheduled)
        return _reason(_container(pod).get("waiting", {}))

    def names(self) -> tuple[str, ...]:
        """As in `Standing`."""
        found = sorted(self.pods, key=lambda pod: str(pod["metadata"]["name"]))
        return tuple(pod["spec"]["nodeName"] for pod in found if "nodeName" in pod["spec"])

    def ended(self, job: Job, run_dir: Path, *, gone: bool, silent: str) -> End:
        """As in `Standing`."""
        if end := next(self._ends_of_pods(run_dir), None):
            return end
        failed = _holds(self.job, "Failed", "FailureTarget")
        if failed.get("reason") == "DeadlineExceeded":
            cause = f"{job.called} reached its time limit in Kubernetes"
            return End(status=LaunchStatus.TIMED_OUT, cause=cause)
        if gone or not self.job or self._is_removed:
            cause = f"{job.called} was deleted in Kubernetes by somebody else"
            return End(status=LaunchStatus.PREEMPTED, cause=cause)
        said = [text for pod in self.pods if (text := self._said(pod))]
        last = f"a pod says: {said[-1]}" if said else "its pods say nothing"
        over = f"{job.called} is over ({_reason(failed) or 'complete'})"
        cause = f"{over}, but {silent} did not say how; {last}"
        return End(status=LaunchStatus.ENVIRONMENT_ERROR, cause=cause)

    def _said(self, pod: Mapping[str, Any]) -> str:
        """The last line of its log, or why its container did not start."""
        return self.logs(pod["metadata"]["name"]) or _reason(_container(pod).get("terminated", {}))

    def _ends_of_pods(self, run_dir: Path) -> Iterator[End]:
        """What happened to a pod, the surest first."""
        for pod in self.pods:
            node = pod["spec"].get("nodeName", "")
            where = f"{pod['metadata']['name']} on node {node}"
            last = _container(pod).get("terminated", {})
            if last.get("reason") == "OOMKilled":
                cause = f"pod {where} was killed for memory (OOMKilled)"
                yield End(status=LaunchStatus.OUT_OF_MEMORY, cause=cause, kind=Kind.HOST_MEMORY)
            if last.get("exitCode") == errno.ENOSPC:
                cause = f"pod {where}: no space left on device, in {run_dir}"
                yield End(status=LaunchStatus.CRASHED, cause=cause, kind=Kind.DISK_FULL)
            disrupted = _holds(pod, "DisruptionTarget")
            if disrupted.get("reason") in _NODE_GONE:
                cause = f"pod {where} lost its node: {_reason(disrupted)}"
                yield End(status=LaunchStatus.HARDWARE_ERROR, cause=cause, node=node)
            told = disrupted or pod["status"]
            if disrupted or told.get("reason") in ("Evicted", "Preempting"):
                cause = f"pod {where} was taken away by Kubernetes: {_reason(told)}"
                yield End(status=LaunchStatus.PREEMPTED, cause=cause)


@dataclass(kw_only=True)
class KubernetesCluster(Cluster):
    """Kubernetes as a `Cluster`, which is asked for every launch with the same pod.

    Of a pod that is gone it remembers what was said last: an eviction ends with its removal.
    """

    request: Request
    name = "kubernetes"
    title = "Kubernetes"
    pending: Standing = JobState(job={}, pods=(), nodes=1)
    by_itself_s = 0.0
    _seen: dict[str, dict[str, Mapping[str, Any]]] = field(default_factory=dict, init=False)

    def run(self, *words: str, given: str = "") -> ToolResult:
        """What it says; its credentials may be variables of this shell."""
        namespace = self.request.pod.metadata.namespace
        where = (f"--namespace={namespace}",) if namespace else ()
        command = ["kubectl", *where, *words]
        return run_tool(command, timeout_s=_TIMEOUT_S, variables=os.environ, given=given)

    def may(self, verb: str, what: str) -> bool:
        """Whether the user may do this. Raises RefusedError if no cluster answers."""
        done = self.run("auth", "can-i", verb, what)
        if (answer := done.stdout.strip().partition(" ")[0]) not in ("yes", "no"):
            raise RefusedError(_words(done))
        return answer == "yes"

    def submit(self, start: Start, job: Job, on: Sequence[str]) -> Job:
        """As in `Cluster`. Raises RefusedError with kubectl's words."""
        # A pod has a path, a home and devices of its own.
        environment = {
            name: value
            for name, value in start.environment.items()
            if name in start.command.env or not is_passed_on(name)
        }
        command = agent.command(place, start.run_dir)
        document = self.request.job(start.launch, job.name, command, environment, on)
        done = self.run("create", "-f", "-", given=json.dumps(document))
        if not done.ok:
            raise RefusedError(f"Kubernetes refused the Job: {_words(done)}")
        return job

    def found(self, job: Job) -> Job:
        """As in `Cluster`: the token in its name is enough."""
        return job

    def look(self, job: Job) -> Standing | None:
        """As in `Cluster`. Raises RefusedError."""
        which = f"--selector={LABEL}={job.name}"
        done = self.run("get", "jobs,pods", which, "--output=json")
        if not done.ok:
            raise RefusedError(_words(done))
        items = json.loads(done.stdout)["items"]
        found = next((one for one in items if one["kind"] == "Job"), None)
        pods = [one for one in items if one["kind"] == "Pod"]
        if found is None and not pods:
            return None
        seen = self._seen.setdefault(job.name, {})
        seen.update({pod["metadata"]["name"]: pod for pod in pods})
        return JobState(
            job=found or {},
            pods=tuple(seen.values()),
            nodes=job.nodes,
            event="" if pods else self._last_warning(job.name),
            logs=self._last_log,
        )

    def is_listed(self, job: Job) -> bool:
        """As in `Cluster`; also where nobody answers."""
        done = self.run("get", "jobs,pods", f"--selector={LABEL}={job.name}", "--output=name")
        return not done.ok or bool(done.stdout.split())

    def cancel(self, job: Job, *, at_once: bool) -> None:
        """As in `Cluster`: with the job goes what it owns; `at_once`, pods without their grace."""
        what = ("pods", "--grace-period=1") if at_once else ("jobs", "--cascade=foreground")
        self.run("delete", *what, f"--selector={LABEL}={job.name}", "--wait=false")

    def calls(self, node: str) -> str:
        """As in `Cluster`."""
        done = self.run("get", "node", node, "--output=json")
        if not done.ok:
            return f"unknown ({_words(done)})"
        ready = _condition(json.loads(done.stdout), "Ready")
        return f"Ready={ready.get('status', 'Unknown')}, {_reason(ready)}"

    def _last_warning(self, name: str) -> str:
        """What the cluster complained of last about an object of this name."""
        fields = f"--field-selector=involvedObject.name={name},type=Warning"
        done = self.run("get", "events", fields, "--output=json")
        items = json.loads(done.stdout)["items"] if done.ok else []
        return f"{items[-1]['reason']}: {items[-1]['message']}" if items else ""

    def _last_log(self, pod: str) -> str:
        """The last line that a pod printed; empty if there is none to be had."""
        done = self.run("logs", pod, "--tail=20")
        said = [line.strip()[:_LONGEST] for line in done.stdout.split("\n") if line.strip()]
        return said[-1] if done.ok and said else ""


def place() -> Place:
    """Where an agent runs in a pod."""
    return Place(
        node=os.environ[NODE_VARIABLE],
        index=int(os.environ.get(_INDEX, "0")),
        address=os.environ[ADDRESS_VARIABLE],
        lingers_s=_LINGERS_S,
        own=("KUBERNETES_", _INDEX, NODE_VARIABLE, ADDRESS_VARIABLE),
    )


# The copy of the pod file that a run began with.
KEPT_POD = "pod.yaml"
_NEEDS = ("create jobs.batch", "delete jobs.batch", "list pods")


class Kubernetes(NodesKind):
    """Jobs of Kubernetes, as `--launcher kubernetes:POD.yaml` names them."""

    name = "kubernetes"
    reads = ("--nodes", "--queue-s", FILE_AFTER)

    def __init__(self, path: str = "") -> None:
        self.path = path

    def lacks(self) -> list[str]:
        """As in `LauncherKind`: kubectl, and what it may do."""
        if shutil.which("kubectl") is None:
            return ["--launcher kubernetes: no kubectl here"]
        try:
            pod = self._pod()
            kubectl = KubernetesCluster(request=Request(pod=pod, gpus=0, queue_s=0))
            denied = [words for words in _NEEDS if not kubectl.may(*words.split())]
        except UsageError:
            return []  # told with the options
        except RefusedError as error:
            return [f"--launcher kubernetes: {error}"]
        where = f"in the namespace {pod.metadata.namespace or 'of the context'}"
        return [f"--launcher kubernetes: you may not {words} {where}" for words in denied]

    def problems(self, options: RunOptions, profile: Profile) -> list[str]:
        """As in `LauncherKind`."""
        found = super().problems(options, profile)
        try:
            unfit = self._pod().unfit(Path(options.out), gpus_per_node(options, profile))
        except UsageError as error:
            return found + list(error.problems)
        return found + [f"{self.path}: {text}" for text in unfit]

    def cluster(self, setup: Setup, run_root: Path) -> KubernetesCluster:
        """As in `NodesKind`. A run goes on with the pod that it began with."""
        kept = run_root / KEPT_POD
        if not kept.is_file():
            write_atomic(kept, Path(self.path).read_text("utf-8"))
        return KubernetesCluster(request=_request(read_pod(kept), setup))

    def printed(self, launch: Launch, setup: Setup) -> str:
        """As in `LauncherKind`: its manifests, with torchrun alone for the agent."""
        whole, request, name = completed(launch), _request(self._pod(), setup), "runbook"
        words = list(whole.words())
        if words[0] == TORCHRUN and launch.nodes > 1:
            words[1:1] = rendezvous(f"{name}-0.{name}:{RENDEZVOUS_PORT}", name)
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
