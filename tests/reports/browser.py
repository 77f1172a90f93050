"""A headless Chromium, driven over a pipe by the DevTools protocol: just enough to look at pages.

The protocol is JSON between zero bytes on file descriptors 3 and 4, so that no port is opened and
no package is needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = f"no browser: none of {', '.join(NAMES)} is installed (apt-get install chromium)"
_LIMIT_S = 60.0
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "about:blank"),
)


def chromium() -> str | None:
    """The path of an installed browser, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Browser:
    """One tab. `events` are all messages of the browser that answer nothing."""

    sends: int
    hears: int
    session: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    _rest: bytes = b""
    _number: int = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The browser's answer. Raises RuntimeError for an error, TimeoutError for silence."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.sends, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _LIMIT_S
        while b"\0" not in self._rest:
            if not select.select([self.hears], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser says nothing")
            block = os.read(self.hears, 1 << 20)
            if not block:
                raise EOFError("the browser has gone")
            self._rest += block
        first, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message

    def open(self, page: Path, *, width: int, height: int, dark: bool = False) -> None:
        """Load a page at this size and color scheme; `events` are those of this page alone."""
        self.events.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.call("Page.navigate", url=page.as_uri())
        while self.value("document.readyState") != "complete" or "about:" in self.value(
            "location.href"
        ):
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """What the expression is worth on the page, as JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def key(self, name: str, code: int) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            press = {"type": kind, "key": name, "code": name, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", **press)

    def screenshot(self, target: Path) -> None:
        """The first screen as PNG."""
        answer = self.call("Page.captureScreenshot")
        target.write_bytes(base64.b64decode(answer["data"]))

    def said(self) -> list[str]:
        """What the page's console shows, and what the browser complained about."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(one["params"]) for one in self.events if one.get("method") in kinds]

    def requests(self) -> list[str]:
        """Every address that was asked for."""
        return [
            one["params"]["request"]["url"]
            for one in self.events
            if one.get("method") == "Network.requestWillBeSent"
        ]


@contextmanager
def running(program: str) -> Iterator[Browser]:
    """A browser with a profile of its own; its processes end with it."""
    its_in, our_out = os.pipe()
    our_in, its_out = os.pipe()
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        actions: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_DUP2, its_in, 3),
            (os.POSIX_SPAWN_DUP2, its_out, 4),
            *((os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)),
        ]
        words = [program, f"--user-data-dir={profile}", *_FLAGS]
        child = os.posix_spawn(program, words, os.environ, file_actions=actions, setpgroup=0)
        os.close(its_in)
        os.close(its_out)
        try:
            browser = Browser(sends=our_out, hears=our_in)
            tab = next(
                one
                for one in browser.call("Target.getTargets")["targetInfos"]
                if one["type"] == "page"
            )
            attached = browser.call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)
            browser.session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                browser.call(f"{domain}.enable")
            yield browser
        finally:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(our_out)
            os.close(our_in)
