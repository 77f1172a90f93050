"""The user's pod, and what a launch makes of it: a Job.

Everything that clusters differ in is in the pod file, an ordinary manifest of kind Pod: namespace,
image, volumes, node selectors, tolerations, secrets, further resources.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from runbook.config.extends import read_mapping, validated
from runbook.records import Launch

# On the Job and its pods, with the job's name: by it they are found, and nothing else is.
LABEL = "nsa-runbook/job"
GPU = "nvidia.com/gpu"
NODE_VARIABLE = "RUNBOOK_POD_NODE"
ADDRESS_VARIABLE = "RUNBOOK_POD_ADDRESS"
_SHM = "/dev/shm"  # noqa: S108 - where ranks share memory
_SHM_VOLUME = "runbook-shm"
# The job and its pods stay so long if the harness that would remove them was killed.
_TTL_S = 3600
_GRACE_S = 10
# Kubernetes ends a job by itself only if the harness could not: after its limits and this.
_MARGIN_S = 300.0
_HOST = "kubernetes.io/hostname"
# Volumes that nobody else sees.
_NOT_SHARED = ("configMap", "downwardAPI", "emptyDir", "ephemeral", "image", "projected", "secret")


class _Open(BaseModel):
    """Of a manifest what is read here; the rest is for Kubernetes."""

    model_config = ConfigDict(extra="allow")


class Named(_Open):
    """A volume, or where one is mounted."""

    name: str


class Mount(Named):
    """Where a volume is mounted."""

    mountPath: str


class Resources(_Open):
    """What a container gets at most."""

    limits: dict[str, str | int] = {}


class Container(_Open):
    """That of the trainer. What it runs is the launch's."""

    image: str
    name: str = "trainer"
    env: list[dict[str, Any]] = []
    volumeMounts: list[Mount] = []
    resources: Resources = Resources()
    command: None = None
    args: None = None


class Spec(_Open):
    """What runs, and on which nodes; the keys that have to be absent are set by a launch."""

    containers: list[Container] = Field(min_length=1)
    volumes: list[Named] = []
    affinity: None = None
    hostname: None = None
    nodeName: None = None
    restartPolicy: Literal["Never"] = "Never"
    subdomain: None = None


class Metadata(_Open):
    """Of the pods and their Job; without a namespace they are in that of kubectl's context."""

    namespace: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class PodFile(_Open):
    """The user's pod; its first container is that of the trainer."""

    kind: Literal["Pod"]
    metadata: Metadata = Metadata()
    spec: Spec

    def unfit(self, out: Path, gpus: int) -> list[str]:
        """Why runs below `out` with so many GPUs in each pod do not fit it, in words."""
        found, folder, container = [], out.resolve(), self.spec.containers[0]
        shared = {
            one.name
            for one in self.spec.volumes
            if not any(kind in (one.model_extra or {}) for kind in _NOT_SHARED)
        }
        mounts = [one.mountPath for one in container.volumeMounts if one.name in shared]
        if not any(folder.is_relative_to(mount) for mount in mounts):
            there = ", ".join(mounts) or "none"
            found.append(f"--out {folder} is below no shared volume of the pod (mounted: {there})")
        asked = container.resources.limits.get(GPU, gpus)
        if str(asked) != str(gpus):
            found.append(f"{GPU} is {asked}, and the profile has {gpus} on each node")
        return found


def read_pod(path: Path) -> PodFile:
    """The pod in a file. Raises UsageError with everything that is wrong with it."""
    return validated(PodFile, read_mapping("the pod", path), str(path))


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of Kubernetes for every launch of a run.

    `gpus` are those of each node; a job may wait `queue_s` for its nodes.
    """

    pod: PodFile
    gpus: int
    queue_s: float

    def job(
        self,
        launch: Launch,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        on: Sequence[str] = (),
    ) -> dict[str, Any]:
        """The Job of a launch: a pod on each node, on those of `on` as far as they are named."""
        nodes, deadline_s = launch.nodes, self.queue_s + launch.timeout_s + _MARGIN_S
        spec = self.pod.spec.model_dump(exclude_none=True, exclude_unset=True)
        container = spec["containers"][0]
        container |= {"name": self.pod.spec.containers[0].name, "command": list(command)}
        container["env"] = [
            *container.get("env", ()),
            *({"name": key, "value": value} for key, value in environment.items()),
            _field(NODE_VARIABLE, "spec.nodeName"),
            _field(ADDRESS_VARIABLE, "status.podIP"),
        ]
        if self.gpus:
            container.setdefault("resources", {}).setdefault("limits", {})[GPU] = self.gpus
        if not any(mount.mountPath == _SHM for mount in self.pod.spec.containers[0].volumeMounts):
            shm = {"name": _SHM_VOLUME}
            container.setdefault("volumeMounts", []).append({**shm, "mountPath": _SHM})
            memory = {**shm, "emptyDir": {"medium": "Memory"}}
            spec.setdefault("volumes", []).append(memory)
        # The run's folder is private to whoever started the harness.
        spec.setdefault("securityContext", {"runAsUser": os.getuid(), "runAsGroup": os.getgid()})
        spec = {"automountServiceAccountToken": False, "enableServiceLinks": False, **spec}
        spec |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": _GRACE_S}
        spec |= {"subdomain": name} if nodes > 1 else {}
        spec |= _affinity(name, nodes, on)
        labels = {**self.pod.metadata.labels, LABEL: name}
        labelled = {"labels": labels, "annotations": self.pod.metadata.annotations}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, **labelled, **self._namespace},
            "spec": {
                **({"completionMode": "Indexed"} if nodes > 1 else {}),
                "completions": nodes,
                "parallelism": nodes,
                "backoffLimit": 0,
                "activeDeadlineSeconds": int(deadline_s),
                "ttlSecondsAfterFinished": _TTL_S,
                "template": {"metadata": labelled, "spec": spec},
            },
        }

    def service(self, name: str) -> dict[str, Any]:
        """The headless Service by whose names the pods of a printed job meet, ready or not.

        Those of a launch have an agent each, which says where the first one is.
        """
        selector = {LABEL: name}
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, **self._namespace, "labels": selector},
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector},
        }

    @property
    def _namespace(self) -> dict[str, str]:
        name = self.pod.metadata.namespace
        return {"namespace": name} if name else {}


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _affinity(name: str, nodes: int, on: Sequence[str]) -> dict[str, Any]:
    """One pod on a node, and on the run's own nodes; the scheduler chooses those beyond them."""
    found: dict[str, Any] = {}
    if nodes > 1:
        apart = {"topologyKey": _HOST, "labelSelector": {"matchLabels": {LABEL: name}}}
        found["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    # A term by the name of a node holds one; terms are alternatives.
    terms = [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        for node in on
    ]
    if len(on) >= nodes:
        which: Any = {"nodeSelectorTerms": terms}
        found["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": which}
    elif terms:
        which = [{"weight": 100, "preference": term} for term in terms]
        found["nodeAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": which}
    return {"affinity": found} if found else {}
