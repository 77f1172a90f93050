"""A Kubernetes on this machine alone: the API that kubectl speaks, and what stands behind it.

Jobs, pods, services, nodes and events as JSON over plain HTTP, as far as `kubectl` asks for them
here. What is made is held against the published schemas (kubernetes-validate) first. A thread is
the Job controller, the scheduler, the kubelet of every node and the garbage collector; a container
is a process with the image's environment, and shares the file system whatever its volumes are.
Names of pods below a headless Service are known in the pods alone, as in a cluster.
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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import psutil

SCHEMAS = "1.32"
NAMESPACE = "training"
GROUPS = {"v1": "/api/v1", "batch/v1": "/apis/batch/v1"}
KINDS = {
    "jobs": ("batch/v1", "Job"),
    "pods": ("v1", "Pod"),
    "services": ("v1", "Service"),
    "events": ("v1", "Event"),
    "nodes": ("v1", "Node"),
    "persistentvolumeclaims": ("v1", "PersistentVolumeClaim"),
}
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
# What a name service is to the pods: an address by name, from a file that changes.
RESOLVER = """
import json, os, socket
_known = socket.gethostbyname
def _found(name):
    with open(os.environ["CLUSTER_DNS"]) as stream:
        return _known(json.load(stream).get(name, name))
socket.gethostbyname = _found
"""

Object = dict[str, Any]


# The document of an older kubectl, with no kind in it: then it checks nothing itself.
OPENAPI_V2 = b"\n\x032.0\x12\x06\n\x01x\x12\x011"


class Refused(Exception):
    """What the API answers with another code than 2xx."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Cluster:
    """Nodes k0, k1, ...; `environment` makes kubectl talk to it."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder.resolve()
        self.names = tuple(f"k{index}" for index in range(nodes))
        self.lock = threading.RLock()
        self.objects: dict[tuple[str, str], Object] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.cordoned: set[str] = set()
        self.down: set[str] = set()
        # What users may not do, and what the quota of the namespace refuses.
        self.denied: set[str] = set()
        self.quota: set[str] = set()
        self._kill_at: dict[str, float] = {}
        self._named: dict[str, str] = {}
        self._closed = threading.Event()

    def up(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "sitecustomize.py").write_text(RESOLVER)
        self._dns = self.folder / "dns.json"
        self._dns.write_text("{}")
        for name in self.names:
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
            node = {"metadata": {"name": name}, "status": {"conditions": [ready]}}
            self.put("nodes", node)
        self.put("persistentvolumeclaims", {"metadata": {"name": "shared"}})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self))
        self._server.daemon_threads = True
        where = f"http://127.0.0.1:{self._server.server_address[1]}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": where}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "namespace": NAMESPACE}}],
        }
        (self.folder / "config").write_text(json.dumps(config))
        self.environment = {
            "KUBECONFIG": str(self.folder / "config"),
            "KUBECACHEDIR": str(self.folder / "cache"),
        }
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True),
            threading.Thread(target=self._control, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def down_all(self) -> None:
        """End everything."""
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()
        for name in list(self.processes):
            self._kill(name)

    # Objects

    def put(self, kind: str, document: Object) -> Object:
        api, name = KINDS[kind]
        document |= {"apiVersion": api, "kind": name}
        document["metadata"] |= {"uid": secrets.token_hex(8), "creationTimestamp": now()}
        if kind != "nodes":
            document["metadata"].setdefault("namespace", NAMESPACE)
        self.objects[kind, document["metadata"]["name"]] = document
        return document

    def all(self, kind: str) -> list[Object]:
        with self.lock:
            return [one for (its, _), one in self.objects.items() if its == kind]

    def left(self) -> list[str]:
        """Jobs, pods and services that there are."""
        return [name for kind in ("jobs", "pods", "services") for name in self._names(kind)]

    def _names(self, kind: str) -> list[str]:
        return [f"{kind}/{one['metadata']['name']}" for one in self.all(kind)]

    def create(self, kind: str, document: Object) -> Object:
        name = document["metadata"]["name"]
        try:
            kubernetes_validate.validate(document, SCHEMAS, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise Refused(400, "BadRequest", f"strict decoding error: {error.message}") from error
        for term in _terms_by_node(document):
            # "must be only one value", says the validation of the API server.
            if any(len(field["values"]) != 1 for field in term["matchFields"]):
                raise Refused(422, "Invalid", "matchFields: must be only one value")
        if kind in self.quota:
            raise Refused(403, "Forbidden", f'{kind} "{name}" is forbidden: exceeded quota: gpus')
        if (kind, name) in self.objects:
            raise Refused(409, "AlreadyExists", f'{kind} "{name}" already exists')
        return self.put(kind, document | {"status": {}})

    def reviewed(self, path: str, given: bytes) -> Object | None:
        """Whether somebody may do what is asked; it comes as protobuf, where texts stand plain."""
        if path != REVIEWS:
            return None
        asks = [all(word.encode() in given for word in one.split()) for one in self.denied]
        kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        return {**kind, "spec": {}, "status": {"allowed": not any(asks)}}

    def get(self, kind: str, name: str) -> Object:
        if (kind, name) not in self.objects:
            raise Refused(404, "NotFound", f'{kind} "{name}" not found')
        return self.objects[kind, name]

    def delete(self, kind: str, name: str, options: Object) -> Object:
        found = self.get(kind, name)
        found["metadata"].setdefault("deletionTimestamp", now())
        if kind == "pods":
            self._terminate(found, options.get("gracePeriodSeconds"))
        elif kind != "jobs":
            del self.objects[kind, name]
        return found

    # What happens to pods

    def pod_on(self, node: str) -> Object:
        """The pod that runs on a node."""
        return next(pod for pod in self.all("pods") if pod["spec"].get("nodeName") == node)

    def evict(self, node: str, reason: str = "EvictionByEvictionAPI", message: str = "") -> None:
        """What a drain does, or a pod of a higher priority."""
        with self.lock:
            pod = self.pod_on(node)
            _set(pod, "DisruptionTarget", "True", reason, message)
            self.delete("pods", pod["metadata"]["name"], {})

    def fail(self, node: str, *, reason: str = "", container: str = "Error") -> None:
        """What a kubelet does: of a pod, such as Evicted, or its kernel, such as OOMKilled."""
        with self.lock:
            pod = self.pod_on(node)
            name = pod["metadata"]["name"]
            self._kill(name)
            self._ended(pod, -9, reason=container)
            if reason:
                pod["status"] |= {"reason": reason, "message": "The node was low on resource: m"}

    def power_off(self, node: str) -> None:
        """Its processes end at once, and nobody says so."""
        with self.lock:
            self.down.add(node)
            _set(self.objects["nodes", node], "Ready", "Unknown", "NodeStatusUnknown", "no word")
            name = self.pod_on(node)["metadata"]["name"]
        self._kill(name)

    def power_on(self, node: str) -> None:
        with self.lock:
            self.down.discard(node)
            _set(self.objects["nodes", node], "Ready", "True", "KubeletReady", "")

    # The thread

    def _control(self) -> None:
        while not self._closed.wait(0.05):
            with self.lock:
                for job in self.all("jobs"):
                    self._control_job(job)
                for pod in self.all("pods"):
                    self._schedule(pod)
                    if pod["spec"].get("nodeName") not in self.down:
                        self._keep(pod)
                self._collect()
                self._tell_names()

    def _control_job(self, job: Object) -> None:
        spec, status = job["spec"], job["status"]
        indexed = spec.get("completionMode") == "Indexed"
        pods = self._pods_of(job)
        ending = "deletionTimestamp" in job["metadata"]
        if not status.get("startTime") and not ending:
            status |= {"startTime": now(), "began": time.monotonic()}
            if "pods" in self.quota:
                self._warn(job, "FailedCreate", "exceeded quota: gpus")
                return
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
        allowed = [field["values"] for term in _terms(required) for field in term["matchFields"]]
        taken = {
            other["spec"].get("nodeName")
            for other in self.all("pods")
            if "podAntiAffinity" in affinity
            and other["metadata"]["labels"] == pod["metadata"]["labels"]
        }
        free = [
            node
            for node in self.names
            if node not in self.cordoned | self.down | taken and (not allowed or [node] in allowed)
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
        if container["image"].startswith("absent"):
            why = {
                "reason": "ImagePullBackOff",
                "message": f"Back-off pulling {container['image']}",
            }
            _state(pod, {"waiting": why})
            return
        pod["status"]["podIP"] = "127.0.0.1"
        fields = {"spec.nodeName": pod["spec"]["nodeName"], "status.podIP": "127.0.0.1"}
        image = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        image |= {"PYTHONPATH": str(self.folder), "CLUSTER_DNS": str(self._dns)}
        image |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        given = {
            one["name"]: one["value"]
            if "value" in one
            else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container["env"]
        }
        name = pod["metadata"]["name"]
        with (self.folder / f"{name}.log").open("ab") as log:
            if not Path(container["command"][0]).is_file():
                self._ended(
                    pod, 128, reason="StartError", message="exec: no such file or directory"
                )
                return
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

    def _ended(self, pod: Object, code: int, *, reason: str = "Error", message: str = "") -> None:
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        told = {"exitCode": code if code >= 0 else 128 - code}
        told |= {"reason": reason if code else "Completed", "message": message}
        _state(pod, {"terminated": told})

    def _terminate(self, pod: Object, grace_s: float | None) -> None:
        name = pod["metadata"]["name"]
        if pod["spec"].get("nodeName") in self.down or name not in self.processes:
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

    def _tell_names(self) -> None:
        known = {}
        for service in self.all("services"):
            wanted = service["spec"]["selector"].items()
            for pod in self.all("pods"):
                inside = wanted <= pod["metadata"]["labels"].items()
                below = pod["spec"].get("subdomain") == service["metadata"]["name"]
                if inside and below and "podIP" in pod["status"]:
                    name = f"{pod['spec']['hostname']}.{service['metadata']['name']}"
                    known[name] = pod["status"]["podIP"]
        if known != self._named:
            temporary = self._dns.with_suffix(".new")
            temporary.write_text(json.dumps(known))
            temporary.replace(self._dns)
            self._named = known

    def _collect(self) -> None:
        for job in self.all("jobs"):
            if "deletionTimestamp" in job["metadata"] and not self._pods_of(job):
                del self.objects["jobs", job["metadata"]["name"]]
        uids = {job["metadata"]["uid"] for job in self.all("jobs")}
        for service in self.all("services"):
            owners = service["metadata"].get("ownerReferences", ())
            if owners and owners[0]["uid"] not in uids:
                del self.objects["services", service["metadata"]["name"]]

    def _warn(self, job: Object, reason: str, message: str) -> None:
        name = job["metadata"]["name"]
        about = {"reason": reason, "message": message, "type": "Warning"}
        about["involvedObject"] = {"name": name}
        self.put("events", {"metadata": {"name": f"{name}.1"}, **about})


def _terms(affinity: Object) -> list[Object]:
    found: list[Object] = affinity.get("nodeSelectorTerms", [])
    return found


def _terms_by_node(document: Object) -> list[Object]:
    spec = document["spec"].get("template", {}).get("spec", {})
    affinity = spec.get("affinity", {}).get("nodeAffinity", {})
    chosen = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ())
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    return [*_terms(required), *(one["preference"] for one in chosen)]


def _set(document: Object, kind: str, status: str, reason: str, message: str) -> None:
    told = document["status"].setdefault("conditions", [])
    told[:] = [one for one in told if one["type"] != kind]
    told.append({"type": kind, "status": status, "reason": reason, "message": message})


def _state(pod: Object, state: Object) -> None:
    name = pod["spec"]["containers"][0]["name"]
    pod["status"]["containerStatuses"] = [{"name": name, "state": state}]


def handler_of(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Nothing."""

        def _answer(self) -> None:
            given = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with cluster.lock:
                code, found = answered(cluster, self.command, self.path, given)
                plain = isinstance(found, str)
                data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if plain else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = _answer

    return Handler


def answered(cluster: Cluster, method: str, path: str, given: bytes) -> tuple[int, Object | str]:
    """The code and the document, or a log."""
    try:
        return 201 if method == "POST" else 200, found(cluster, method, path, given)
    except Refused as error:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": error.code}
        return error.code, status | {"reason": error.reason, "message": str(error)}


def found(cluster: Cluster, method: str, path: str, given: bytes) -> Object | str:
    """What a path names, or what came of it."""
    url = urlsplit(path)
    if url.path == "/openapi/v2":
        return OPENAPI_V2.decode()
    if known := discovered(url.path) or cluster.reviewed(url.path, given):
        return known
    _, _, rest = url.path.partition("/v1/")
    parts = rest.split("/")
    parts = parts[2:] if parts[0] == "namespaces" else parts
    kind, name = parts[0] if parts else "", parts[1] if len(parts) > 1 else ""
    if kind not in KINDS or not url.path.startswith(GROUPS[KINDS[kind][0]]):
        raise Refused(404, "NotFound", "the server could not find the requested resource")
    if parts[2:] == ["log"]:
        return (cluster.folder / f"{name}.log").read_text()
    if method == "POST":
        return cluster.create(kind, json.loads(given))
    if method == "DELETE":
        return cluster.delete(kind, name, json.loads(given or b"{}"))
    if name:
        return cluster.get(kind, name)
    asked = {key: values[0] for key, values in parse_qs(url.query).items()}
    items = [one for one in cluster.all(kind) if chosen(one, asked)]
    api, single = KINDS[kind]
    return {"apiVersion": api, "kind": f"{single}List", "metadata": {}, "items": items}


def chosen(document: Object, asked: Object) -> bool:
    """Whether the selectors of a query take it."""
    labels = document["metadata"].get("labels", {})
    for text in filter(None, asked.get("labelSelector", "").split(",")):
        key, _, value = text.partition("=")
        if labels.get(key) != value:
            return False
    for text in filter(None, asked.get("fieldSelector", "").split(",")):
        path, _, value = text.partition("=")
        found: Any = document
        for key in path.split("."):
            found = found.get(key, {})
        if found != value:
            return False
    return True


def discovered(path: str) -> Object | None:
    """What kubectl asks first: which groups and kinds there are, and who checks fields."""
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = []
        for name in ("batch", "authorization.k8s.io"):
            version = {"groupVersion": f"{name}/v1", "version": "v1"}
            groups.append({"name": name, "versions": [version], "preferredVersion": version})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path in ("/openapi/v3",):
        paths = {
            where.strip("/"): {"serverRelativeURL": f"/openapi/v3{where}"}
            for where in GROUPS.values()
        }
        return {"paths": paths}
    for api, where in GROUPS.items():
        if path == where:
            verbs = ["create", "delete", "get", "list", "patch", "watch"]
            resources = [
                {"name": plural, "kind": kind, "verbs": verbs, "singularName": kind.lower()}
                | {"namespaced": plural != "nodes"}
                for plural, (its, kind) in KINDS.items()
                if its == api
            ]
            return {"kind": "APIResourceList", "groupVersion": api, "resources": resources}
        if path == f"/openapi/v3{where}":
            return {
                "openapi": "3.0.0",
                "info": {"title": api, "version": "1"},
                "paths": checked(api),
            }
    if path == "/apis/authorization.k8s.io/v1":
        return {"kind": "APIResourceList", "groupVersion": path[6:], "resources": []}
    return None


def checked(api: str) -> Object:
    """That the server checks fields itself (`fieldValidation`), kind by kind."""
    group, _, version = api.rpartition("/")
    says = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    return {
        f"{GROUPS[api]}/namespaces/{{namespace}}/{plural}": {
            "patch": {
                "parameters": [says],
                "x-kubernetes-group-version-kind": {
                    "group": group, "version": version, "kind": kind
                },
            }
        }
        for plural, (its, kind) in KINDS.items()
        if its == api
    }  # fmt: skip
