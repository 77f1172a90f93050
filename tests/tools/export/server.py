"""A real HTTP server on this machine that answers as a test wants, and keeps what it was sent."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "T0KEN-of-the-address"
HANG, DRIP = -1, -2


@dataclass
class Received:
    """The address with its secret, and what came: paths, headers, documents."""

    url: str = ""
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    documents: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def serving(codes: Sequence[int]) -> Iterator[Received]:
    """Answer the first POST with the first code and so on, then with the last one again."""
    received, over = Received(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            code = codes[min(len(received.paths), len(codes) - 1)]
            received.paths.append(self.path)
            received.headers.append(dict(self.headers))
            received.documents.append(json.loads(body))
            if code == HANG:
                over.wait(60)
            elif code == DRIP:
                while not over.is_set():
                    self.wfile.write(b"H")
                    self.wfile.flush()
                    time.sleep(0.05)
            else:
                self.send_response(code)
                self.send_header("Location", f"{received.url}-elsewhere")
                self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(BrokenPipeError, ConnectionResetError):
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    received.url = f"http://127.0.0.1:{server.server_port}/hooks/{SECRET}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield received
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()
