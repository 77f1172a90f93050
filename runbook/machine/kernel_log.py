"""What the kernel logged while a launch ran: its own window, found without comparing clocks.

The kernel's stamps are not those of any clock that this program can read (its clock is not
corrected by NTP, and drifts by seconds in months), so a window begins where the log ended when
the launch began: by the last line of dmesg, or by the journal's cursor.

Kept are lines that concern a launch: errors of GPUs and of their links, lack of memory. A line is
kept as the kernel wrote it, and read again from its text whenever it is judged.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from runbook.files import shipped_data, utc_text, write_document
from runbook.folder import KERNEL_LOG_JSON
from runbook.folder.facts import redact_text
from runbook.process import run_tool
from runbook.records.measurement import Record

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
    left_out: int = 0
    lines: list[KernelLine] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Keep a line that concerns a launch, and only count those beyond the most."""
        line = parse_line(redact_text(text))
        if line is not None and len(self.lines) < MOST_LINES:
            self.lines.append(line)
        elif line is not None:
            self.left_out += 1

    def write(self, run_dir: Path, *, began_at: str) -> None:
        """Write `kernel_log.json`."""
        times = {"began_at": began_at, "ended_at": utc_text()}
        told = {**vars(self), "lines": [line.text for line in self.lines]}
        write_document(run_dir / KERNEL_LOG_JSON, {**times, **told})


class Unreadable(Exception):
    """Raised by a source that cannot be read; holds why."""


# Adds what was logged since the source was opened.
_Read = Callable[[KernelWindow], None]


class KernelLog:
    """The window of one launch: it begins when this is made and ends with `close()`."""

    def __init__(self) -> None:
        self._began_at = utc_text()
        problems = []
        for name, opened in (("dmesg --raw", _dmesg), ("journalctl -k", _journal)):
            try:
                self._read: _Read = opened()
                self._window = KernelWindow(source=name)
                return
            except Unreadable as problem:
                problems.append(str(problem))
        self._window = KernelWindow(source="", problem="; ".join(problems))

    def close(self, run_dir: Path) -> KernelWindow:
        """Read the window, write `kernel_log.json` into `run_dir`, and return the window."""
        if self._window.source:
            try:
                self._read(self._window)
            except Unreadable as problem:
                self._window.problem = str(problem)
        self._window.write(run_dir, began_at=self._began_at)
        return self._window


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


_ADDRESS = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
_XID = re.compile(rf"NVRM: Xid \((?:PCI:)?({_ADDRESS})\): (\d+)")
# What a line of the kernel log may be about.
_KINDS = {
    "xid": _XID,
    "sxid": re.compile(r"\bSXid \("),
    "nvrm": re.compile(r"\bNVRM:"),
    "nvlink": re.compile(r"nvlink|nvswitch", re.IGNORECASE),
    "pcie": re.compile(r"\bAER:|PCIe Bus Error|\bpciehp\b|\bDPC:|PCI device .* link is down"),
    "oom": re.compile(r"[Oo]ut of memory: Kill|invoked oom-killer|\boom-kill:|\boom_reaper:"),
}
_KILLED = re.compile(r"[Oo]ut of memory: Kill(?:ed)? process (\d+) \(([^)]*)\)")
_PCI = re.compile(r"\b[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]\b")
_UNCORRECTED = re.compile(
    r"severity=Uncorrect|Uncorrect\w* (?:\(\S*\) )?error|AER: .*(?:[Ff]atal)|Link Down"
    r"|link is down|\bDPC: containment"
)


@dataclass(frozen=True, kw_only=True)
class KernelLine:
    """One line, of one of `_KINDS`. `pci` holds every address in it, as `0000:17:00`.

    `pid` is one that was killed.

    `fatal`: an uncorrected error or a lost link; a corrected one and a mere message are not.
    `node`: whose kernel wrote it; empty where there is only this machine.
    """

    kind: str
    text: str
    xid: int | None = None
    pci: tuple[str, ...] = ()
    pid: int | None = None
    fatal: bool = False
    node: str = ""


def parse_line(text: str) -> KernelLine | None:
    """The line, or None if it concerns neither GPU, link nor memory.

    >>> line = parse_line("NVRM: Xid (PCI:0000:17:00): 79, GPU has fallen off the bus.")
    >>> line.kind, line.xid, line.pci
    ('xid', 79, ('0000:17:00',))
    >>> parse_line("EXT4-fs (vda): mounted filesystem")
    """
    kind = next((kind for kind, pattern in _KINDS.items() if pattern.search(text)), None)
    if kind is None:
        return None
    found, killed = _XID.search(text), _KILLED.search(text)
    addresses = [found.group(1)] if found else _PCI.findall(text)
    fatal = {
        "xid": True,
        "sxid": "Non-fatal" not in text,
        "pcie": _UNCORRECTED.search(text) is not None,
    }
    return KernelLine(
        kind=kind,
        text=text,
        xid=int(found.group(2)) if found else None,
        pci=tuple(dict.fromkeys(slot_of(address) for address in addresses)),
        pid=int(killed.group(1)) if killed else None,
        fatal=fatal.get(kind, False),
    )


def slot_of(address: str) -> str:
    """Domain, bus and device of a PCI address, however it was written.

    >>> slot_of("00000000:CA:00.0"), slot_of("0000:ca:00"), slot_of("CA:00.0")
    ('0000:ca:00', '0000:ca:00', '0000:ca:00')
    """
    parts = address.lower().split(".")[0].split(":")
    if len(parts) < 2:
        return address.lower()  # no address; it is equal to no other
    domain = parts[-3][-4:] if len(parts) > 2 else ""
    return f"{domain.rjust(4, '0')}:{parts[-2]}:{parts[-1]}"


def concerns(line: KernelLine, slots: Collection[str]) -> bool:
    """Is the line about one of these PCI places? Yes where no place is known, in line or launch.

    A switch of NVLink (SXid) has a place of its own, between all GPUs.
    """
    return line.kind == "sxid" or not slots or not line.pci or bool(set(line.pci) & set(slots))


def parse_lines(texts: Iterable[str]) -> list[KernelLine]:
    """Those of the lines that concern a launch, in their order."""
    return [line for text in texts if (line := parse_line(text)) is not None]


CATALOG = "docs.nvidia.com/deploy/xid-errors"


class Xid(Record):
    """One number; the fields are those of `configs/machines/xids.yaml`, explained there."""

    meaning: str
    remedy: str
    hardware: bool
    ends: bool = True


def _xids() -> dict[int, Xid]:
    document = shipped_data("machines/xids")
    remedies = document["remedies"]
    return {
        number: Xid(**{**one, "remedy": remedies.get(one["remedy"], one["remedy"])})
        for number, one in document["xids"].items()
    }


XIDS = _xids()


def describe(number: int) -> str:
    """`Xid 79 (GPU has fallen off the bus)`, also for a number that the table lacks.

    >>> describe(45)
    'Xid 45 (preemptive cleanup after an earlier error)'
    >>> describe(999)
    'Xid 999 (not in the table; see docs.nvidia.com/deploy/xid-errors)'
    """
    known = XIDS.get(number)
    return f"Xid {number} ({known.meaning if known else f'not in the table; see {CATALOG}'})"


def is_hardware_fault(number: int) -> bool:
    """True for a number that ends a program and that no program can cause; unknown ones do not."""
    known = XIDS.get(number)
    return known is not None and known.hardware and known.ends
