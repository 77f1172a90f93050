"""The API that kubectl speaks, as far as it asks: objects as JSON over plain HTTP.

What is made is held against the published schemas (kubernetes-validate) first.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

SCHEMAS = "1.32"
NAMESPACE = "training"
# What there is: its group, its kind.
KINDS = {
    "jobs": ("batch/v1", "Job"),
    "pods": ("v1", "Pod"),
    "nodes": ("v1", "Node"),
}
GROUPS = {"v1": "/api/v1", "batch/v1": "/apis/batch/v1"}
_REVIEWS = "/apis/authorization.k8s.io/v1"

Object = dict[str, Any]


# What kubectl asks first: which groups and kinds there are.
DISCOVERY = json.loads(Path(__file__).with_name("discovery.json").read_text("utf-8"))
# The document of an older kubectl, with no kind in it: then it checks nothing itself.
OPENAPI_V2 = "\n\x032.0\x12\x06\n\x01x\x12\x011"


class Refused(Exception):
    """What the API answers with another code than 2xx."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Api:
    """The objects of a namespace; `environment` makes kubectl talk to it.

    Users may not do what is `denied`; the quota of the namespace refuses the kinds in `quota`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.lock = threading.RLock()
        self.objects: dict[tuple[str, str], Object] = {}
        self.denied: set[str] = set()
        self.quota: set[str] = set()

    def serve(self) -> None:
        """Answer from now on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
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
        self._serving = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._serving.start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._serving.join()

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

    def get(self, kind: str, name: str) -> Object:
        if (kind, name) not in self.objects:
            raise Refused(404, "NotFound", f'{kind} "{name}" not found')
        return self.objects[kind, name]

    def delete(self, kind: str, name: str, options: Object) -> Object:
        """Have it removed: what becomes of what it owns is the cluster's."""
        raise NotImplementedError

    def answer(self, method: str, path: str, given: bytes) -> tuple[int, Object | str]:
        """The code and the document, or a log."""
        try:
            with self.lock:
                return 201 if method == "POST" else 200, self._found(method, path, given)
        except Refused as error:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
            told = {"code": error.code, "reason": error.reason, "message": str(error)}
            return error.code, status | told

    def _found(self, method: str, path: str, given: bytes) -> Object | str:
        """What a path names, or what came of it."""
        url = urlsplit(path)
        if url.path == "/openapi/v2":
            return OPENAPI_V2
        if url.path in DISCOVERY:
            return DISCOVERY[url.path]
        if url.path == f"{_REVIEWS}/selfsubjectaccessreviews":
            return self._reviewed(given)
        _, _, rest = url.path.partition("/v1/")
        parts = rest.split("/")
        parts = parts[2:] if parts[0] == "namespaces" else parts
        kind, name = parts[0] if parts else "", parts[1] if len(parts) > 1 else ""
        if kind not in KINDS or not url.path.startswith(GROUPS[KINDS[kind][0]]):
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        if parts[2:] == ["log"]:
            return (self.folder / f"{name}.log").read_text()
        if method == "POST":
            return self.create(kind, json.loads(given))
        if method == "DELETE":
            return self.delete(kind, name, json.loads(given or b"{}"))
        if name:
            return self.get(kind, name)
        asked = {key: values[0] for key, values in parse_qs(url.query).items()}
        items = [one for one in self.all(kind) if _chosen(one, asked)]
        api, single = KINDS[kind]
        return {"apiVersion": api, "kind": f"{single}List", "metadata": {}, "items": items}

    def _reviewed(self, given: bytes) -> Object:
        """Whether somebody may do what is asked; it comes as protobuf, where texts stand plain."""
        asks = [all(word.encode() in given for word in one.split()) for one in self.denied]
        kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        return {**kind, "spec": {}, "status": {"allowed": not any(asks)}}


def terms(affinity: Object) -> list[Object]:
    found: list[Object] = affinity.get("nodeSelectorTerms", [])
    return found


def _terms_by_node(document: Object) -> list[Object]:
    spec = document["spec"].get("template", {}).get("spec", {})
    affinity = spec.get("affinity", {}).get("nodeAffinity", {})
    chosen = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ())
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    return [*terms(required), *(one["preference"] for one in chosen)]


def _chosen(document: Object, asked: Object) -> bool:
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


def _handler_of(api: Api) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Nothing."""

        def _answer(self) -> None:
            given = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, found = api.answer(self.command, self.path, given)
            plain = isinstance(found, str)
            data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if plain else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = _answer

    return Handler
