"""What the kernel logged while a launch ran: its own window, found without comparing clocks.

The kernel's stamps are not those of any clock that this program can read (its clock is not
corrected by NTP, and drifts by seconds in months), so a window begins where the log ended when
the launch began: by the last line of dmesg, or by the journal's cursor.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from runbook.files import utc_text, write_atomic
from runbook.folder import KERNEL_LOG_JSON
from runbook.folder.facts import redact_text
from runbook.folder.launch.kernel_lines import KernelLine, parse_line
from runbook.process import run_tool

# A device in a loop of errors must not fill the disk; the first ones tell the cause.
MOST_LINES = 500
_TOOL_TIMEOUT_S = 5.0


@dataclass(kw_only=True)
class KernelWindow:
    """What was logged in the window. `problem` says why it cannot be known, empty if it is.

    `lost` is set where older lines of the window were overwritten before they were read.
    """

    source: str
    problem: str = ""
    lost: bool = False
    others: int = 0
    left_out: int = 0
    lines: list[KernelLine] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Keep a line that concerns a launch, and only count any other."""
        line = parse_line(redact_text(text))
        if line is None:
            self.others += 1
        elif len(self.lines) < MOST_LINES:
            self.lines.append(line)
        else:
            self.left_out += 1

    def write(self, run_dir: Path, *, began_at: str) -> Path:
        """Write `kernel_log.json` and return its path."""
        times = {"began_at": began_at, "ended_at": utc_text()}
        told = {**vars(self), "lines": [line.text for line in self.lines]}
        document = {"schema_version": 1, **times, **told}
        path = run_dir / KERNEL_LOG_JSON
        write_atomic(path, json.dumps(document, indent=2) + "\n")
        return path


class Unreadable(Exception):
    """Raised by a source that cannot be read; holds why."""


# Adds what was logged since the source was opened.
_Read = Callable[[KernelWindow], None]


class KernelLog:
    """The window of one launch: it begins when this is made and ends with `close()`."""

    def __init__(self) -> None:
        self._began_at = utc_text()
        self._source, self._problem = "", ""
        problems = []
        for name, opened in (("dmesg --raw", _dmesg), ("journalctl -k", _journal)):
            try:
                self._read: _Read = opened()
                self._source = name
                return
            except Unreadable as problem:
                problems.append(str(problem))
        self._problem = "; ".join(problems)

    def close(self, run_dir: Path) -> KernelWindow:
        """Read the window, write `kernel_log.json` into `run_dir`, and return the window."""
        window = KernelWindow(source=self._source, problem=self._problem)
        if self._source:
            try:
                self._read(window)
            except Unreadable as problem:
                window = KernelWindow(source=self._source, problem=str(problem))
        window.write(run_dir, began_at=self._began_at)
        return window


_STAMP = re.compile(r"^(?:<\d+>)?\[\s*\d+\.\d+\]\s?")


def _dmesg() -> _Read:
    """The tool of util-linux: the window is what follows the line that was the last."""
    tool = _which("dmesg")

    def lines() -> list[str]:
        return [line for line in _told([tool, "--raw"]) if line.strip()]

    last = next(reversed(lines()), None)

    def read(window: KernelWindow) -> None:
        now = lines()
        begin = len(now) - now[::-1].index(last) if last in now else 0
        window.lost = last is not None and last not in now
        for line in now[begin:]:
            window.add(_STAMP.sub("", line))

    return read


def _journal() -> _Read:
    """The journal's kernel messages after the newest one when the launch began."""
    command = [_which("journalctl"), "-k", "-o", "json", "--no-pager", "--quiet"]

    def entries(option: str) -> list[dict[str, object]]:
        try:
            found = [json.loads(line) for line in _told([*command, option]) if line.strip()]
        except ValueError as error:
            raise Unreadable(f"journalctl -k: not JSON: {error}") from error
        return [entry for entry in found if isinstance(entry, dict)]

    newest = entries("--lines=1")
    cursor = newest[-1].get("__CURSOR") if newest else None
    if not isinstance(cursor, str):
        raise Unreadable("journalctl -k: no kernel message may be read")

    def read(window: KernelWindow) -> None:
        for entry in entries(f"--after-cursor={cursor}"):
            window.add(str(entry.get("MESSAGE", "")))

    return read


def _told(command: list[str]) -> list[str]:
    result = run_tool(command, timeout_s=_TOOL_TIMEOUT_S)
    if not result.ok:
        raise Unreadable(result.problem)
    return result.stdout.splitlines()


def _which(name: str) -> str:
    tool = shutil.which(name)
    if tool is None:
        raise Unreadable(f"{name}: not installed")
    return tool
