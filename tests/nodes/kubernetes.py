"""A Kubernetes on this machine alone: what stands behind the API that kubectl speaks.

A thread is the Job controller, the scheduler, the kubelet of every node and the garbage collector;
a container is a process with the image's environment, and shares the file system whatever its
volumes are.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.nodes.api import Api, Object, now, terms


class Cluster(Api):
    """Nodes k0, k1, ... and what runs on them."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        super().__init__(folder)
        self.names = tuple(f"k{index}" for index in range(nodes))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.cordoned: set[str] = set()
        self.off: set[str] = set()
        self._kill_at: dict[str, float] = {}
        self._closed = threading.Event()

    def up(self) -> None:
        """Start everything."""
        self.serve()
        for name in self.names:
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
            self.put("nodes", {"metadata": {"name": name}, "status": {"conditions": [ready]}})
        self._thread = threading.Thread(target=self._control)
        self._thread.start()

    def down(self) -> None:
        """End everything."""
        self._closed.set()
        self.close()
        self._thread.join()
        for name in list(self.processes):
            self._kill(name)

    def left(self) -> list[str]:
        """Jobs and pods that there are."""
        return [name for kind, name in self.objects if kind in ("jobs", "pods")]

    def delete(self, kind: str, name: str, options: Object) -> Object:
        """As in `Api`."""
        found = self.get(kind, name)
        found["metadata"].setdefault("deletionTimestamp", now())
        if kind == "pods":
            self._terminate(found, options.get("gracePeriodSeconds"))
        elif kind != "jobs":
            del self.objects[kind, name]
        return found

    def pod_on(self, node: str) -> Object:
        """The pod that runs on a node."""
        return next(pod for pod in self.all("pods") if pod["spec"].get("nodeName") == node)

    def evict(self, node: str) -> None:
        """What a drain does."""
        with self.lock:
            pod = self.pod_on(node)
            _set(pod, "DisruptionTarget", "True", "EvictionByEvictionAPI", "")
            self.delete("pods", pod["metadata"]["name"], {})

    def power_off(self, node: str) -> None:
        """Its processes end at once, and nobody says so."""
        with self.lock:
            self.off.add(node)
            _set(self.objects["nodes", node], "Ready", "Unknown", "NodeStatusUnknown", "no word")
            name = self.pod_on(node)["metadata"]["name"]
        self._kill(name)

    def power_on(self, node: str) -> None:
        with self.lock:
            self.off.discard(node)
            _set(self.objects["nodes", node], "Ready", "True", "KubeletReady", "")
        deadline = time.monotonic() + 20  # its kubelet removes what it finds there
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _control(self) -> None:
        while not self._closed.wait(0.05):
            with self.lock:
                for job in self.all("jobs"):
                    self._control_job(job)
                for pod in self.all("pods"):
                    self._schedule(pod)
                    if pod["spec"].get("nodeName") not in self.off:
                        self._keep(pod)
                self._collect()

    def _control_job(self, job: Object) -> None:
        spec, status = job["spec"], job["status"]
        indexed = spec.get("completionMode") == "Indexed"
        pods = self._pods_of(job)
        ending = "deletionTimestamp" in job["metadata"]
        if not status.get("startTime") and not ending:
            status |= {"startTime": now(), "began": time.monotonic()}
            for index in range(spec["completions"]):
                self._make_pod(job, index if indexed else None)
            return
        done = [pod for pod in pods if pod["status"]["phase"] == "Succeeded"]
        failed = [pod for pod in pods if pod["status"]["phase"] == "Failed"]
        over = time.monotonic() - status.get("began", 0) > spec["activeDeadlineSeconds"]
        if over or len(failed) + status.get("failed", 0) > spec["backoffLimit"]:
            reason = "DeadlineExceeded" if over else "BackoffLimitExceeded"
            if not any(one["type"] == "Failed" for one in status.get("conditions", ())):
                _set(job, "Failed", "True", reason, "")
        elif len(done) == spec["completions"]:
            _set(job, "Complete", "True", "CompletionsReached", "")
        if ending or any(one["type"] == "Failed" for one in status.get("conditions", ())):
            for pod in pods:
                if ending or pod["status"]["phase"] in ("Pending", "Running"):
                    self.delete("pods", pod["metadata"]["name"], {})

    def _pods_of(self, job: Object) -> list[Object]:
        return [
            pod
            for pod in self.all("pods")
            if pod["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
        ]

    def _make_pod(self, job: Object, index: int | None) -> None:
        name, template = job["metadata"]["name"], json.loads(json.dumps(job["spec"]["template"]))
        owner = {"kind": "Job", "uid": job["metadata"]["uid"]}
        base = name if index is None else f"{name}-{index}"
        pod = {**template, "status": {"phase": "Pending"}}
        pod["metadata"] |= {
            "name": f"{base}-{secrets.token_hex(3)[:5]}",
            "ownerReferences": [owner],
        }
        if index is not None:
            pod["spec"]["hostname"] = base
            more = {"name": "JOB_COMPLETION_INDEX", "value": str(index)}
            pod["spec"]["containers"][0]["env"].append(more)
        self.put("pods", pod)

    def _schedule(self, pod: Object) -> None:
        if "nodeName" in pod["spec"] or "deletionTimestamp" in pod["metadata"]:
            return
        affinity = pod["spec"].get("affinity", {})
        required = affinity.get("nodeAffinity", {}).get(
            "requiredDuringSchedulingIgnoredDuringExecution", {}
        )
        allowed = [field["values"] for term in terms(required) for field in term["matchFields"]]
        taken = {
            other["spec"].get("nodeName")
            for other in self.all("pods")
            if "podAntiAffinity" in affinity
            and other["metadata"]["labels"] == pod["metadata"]["labels"]
        }
        free = [
            node
            for node in self.names
            if node not in self.cordoned | self.off | taken and (not allowed or [node] in allowed)
        ]
        if free:
            pod["spec"]["nodeName"] = free[0]
            _set(pod, "PodScheduled", "True", "", "")
        else:
            text = f"0/{len(self.names)} nodes are available: {len(self.cordoned)} unschedulable"
            _set(pod, "PodScheduled", "False", "Unschedulable", text)

    def _keep(self, pod: Object) -> None:
        """What the kubelet of its node does next with a pod."""
        name, status = pod["metadata"]["name"], pod["status"]
        process = self.processes.get(name)
        if process is not None:
            code = process.poll()
            if code is not None:
                del self.processes[name]
                self._ended(pod, code)
            elif time.monotonic() > self._kill_at.get(name, float("inf")):
                self._kill(name)
        elif "deletionTimestamp" in pod["metadata"]:
            del self.objects["pods", name]
            self._count(pod)
        elif status["phase"] == "Pending" and "nodeName" in pod["spec"]:
            self._start(pod)

    def _count(self, pod: Object) -> None:
        """A pod that was taken from a job before it was done counts as one that failed."""
        uid = pod["metadata"]["ownerReferences"][0]["uid"]
        job = next((one for one in self.all("jobs") if one["metadata"]["uid"] == uid), None)
        if job is not None and pod["status"]["phase"] != "Succeeded":
            job["status"]["failed"] = job["status"].get("failed", 0) + 1

    def _start(self, pod: Object) -> None:
        container = pod["spec"]["containers"][0]
        pod["status"]["podIP"] = "127.0.0.1"
        fields = {"spec.nodeName": pod["spec"]["nodeName"], "status.podIP": "127.0.0.1"}
        image = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        image |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        given = {
            one["name"]: one["value"]
            if "value" in one
            else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container["env"]
        }
        name = pod["metadata"]["name"]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                container["command"],
                env=image | given,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        pod["status"]["phase"] = "Running"
        _state(pod, {"running": {"startedAt": now()}})

    def _ended(self, pod: Object, code: int) -> None:
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        _state(pod, {"terminated": {"exitCode": code if code >= 0 else 128 - code}})

    def _terminate(self, pod: Object, grace_s: float | None) -> None:
        name = pod["metadata"]["name"]
        if pod["spec"].get("nodeName") in self.off or name not in self.processes:
            return
        grace_s = pod["spec"]["terminationGracePeriodSeconds"] if grace_s is None else grace_s
        if name not in self._kill_at:
            with suppress(ProcessLookupError):
                self.processes[name].send_signal(signal.SIGTERM)
        at = time.monotonic() + grace_s
        self._kill_at[name] = min(at, self._kill_at.get(name, at))

    def _kill(self, name: str) -> None:
        """A container ends with all that is in it."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            tree = [root, *root.children(recursive=True)]
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for one in tree:
                    with suppress(psutil.NoSuchProcess):
                        one.send_signal(number)
        process.wait()

    def _collect(self) -> None:
        for job in self.all("jobs"):
            if "deletionTimestamp" in job["metadata"] and not self._pods_of(job):
                del self.objects["jobs", job["metadata"]["name"]]


def _set(document: Object, kind: str, status: str, reason: str, message: str) -> None:
    told = document["status"].setdefault("conditions", [])
    told[:] = [one for one in told if one["type"] != kind]
    told.append({"type": kind, "status": status, "reason": reason, "message": message})


def _state(pod: Object, state: Object) -> None:
    name = pod["spec"]["containers"][0]["name"]
    pod["status"]["containerStatuses"] = [{"name": name, "state": state}]
