"""A small Hub on the loopback interface: enough of its interface to stream a parquet data set.

Files are served with ranges, as the client of `datasets` asks for them.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from nsa.data.text import FINEWEB_NAME, FINEWEB_SUBSET

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOLDER = "sample/10BT"
README = f"""---
configs:
- config_name: {FINEWEB_SUBSET}
  data_files:
  - split: train
    path: {FOLDER}/*
---
"""


def write_shards(folder: Path, *, shards: int, documents: int, row_group: int = 7) -> list[str]:
    """Parquet files of numbered documents, with a second column; returns all texts in order."""
    import pyarrow
    import pyarrow.parquet as parquet

    (folder / FOLDER).mkdir(parents=True)
    (folder / "README.md").write_text(README)
    texts = []
    for shard in range(shards):
        own = [
            f"shard {shard} document {i}. " + "lorem ipsum " * (1 + i % 5) for i in range(documents)
        ]
        table = pyarrow.table({"text": own, "id": [str(i) for i in range(documents)]})
        path = folder / FOLDER / f"{shard:03d}_00000.parquet"
        parquet.write_table(table, path, row_group_size=row_group)
        texts += own
    return texts


@dataclass
class Hub:
    """What the server does, and what it was asked."""

    root: Path
    asked: list[str] = field(default_factory=list)
    address: str = ""

    def entry(self, name: str) -> dict[str, object]:
        """A file as the Hub lists it."""
        data = (self.root / name).read_bytes()
        oid = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "oid": oid}

    def below(self, folder: str) -> list[dict[str, object]]:
        """Files and folders whose names begin so, as the Hub lists them."""
        names = self.names()
        folders = {str(parent) for name in names for parent in Path(name).parents} - {"."}
        listed = [self.entry(name) for name in names]
        listed += [{"type": "directory", "path": f, "oid": COMMIT, "size": 0} for f in folders]
        return [entry for entry in listed if str(entry["path"]).startswith(folder)]

    def names(self) -> list[str]:
        """All files."""
        found = (p for p in sorted(self.root.rglob("*")) if p.is_file())
        return [p.relative_to(self.root).as_posix() for p in found]


class Handler(BaseHTTPRequestHandler):
    """One request; `hub` is set on a subclass for each server."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _answer(self, body: bytes = b"") -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        api, files = f"/api/datasets/{FINEWEB_NAME}", f"/datasets/{FINEWEB_NAME}/resolve/"
        if path.startswith(files):
            self._file(path[len(files) :].split("/", 1)[1])
        elif path.startswith(f"{api}/tree/"):
            below = path.split("/tree/", 1)[1].partition("/")[2]
            self._json(hub.below(f"{below}/" if below else ""))
        elif path.startswith(f"{api}/paths-info/"):
            wanted = set(re.findall(r"paths=([^&]+)", unquote(body.decode())))
            self._json([entry for entry in hub.below("") if entry["path"] in wanted])
        elif path == api or path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name} for name in hub.names()]
            self._json({"id": FINEWEB_NAME, "sha": COMMIT, "siblings": siblings, "tags": []})
        else:
            self._json({"error": "not found"}, 404)

    def _file(self, name: str) -> None:
        if name not in self.hub.names():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        data, etag = (self.hub.root / name).read_bytes(), self.hub.entry(name)["oid"]
        about = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None:
            self._send(200, data, about)
            return
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        about["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._send(206, data[first : last + 1], about)

    def _json(self, value: object, code: int = 200) -> None:
        self._send(code, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):  # the client has stalled, and gone
                self.wfile.write(data)


@contextmanager
def serve(root: Path) -> Iterator[Hub]:
    """Serve the data set in `root` until the block ends."""
    hub = Hub(root=root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Handler", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
