"""Lines of the kernel log that concern a launch: errors of GPUs and of their links, lack of memory.

A line is kept as the kernel wrote it, and read again from its text whenever it is judged.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from runbook.files import shipped_data
from runbook.records.measurement import Record


class Kind(StrEnum):
    """What a line of the kernel log is about."""

    XID = "xid"
    SXID = "sxid"
    NVRM = "nvrm"
    NVLINK = "nvlink"
    PCIE = "pcie"
    OOM = "oom"


_ADDRESS = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
_XID = re.compile(rf"NVRM: Xid \((?:PCI:)?({_ADDRESS})\): (\d+)")
_KINDS = (
    (Kind.XID, _XID),
    (Kind.SXID, re.compile(r"\bSXid \(")),
    (Kind.NVRM, re.compile(r"\bNVRM:")),
    (Kind.NVLINK, re.compile(r"nvlink|nvswitch", re.IGNORECASE)),
    (Kind.PCIE, re.compile(r"\bAER:|PCIe Bus Error|\bpciehp\b|\bDPC:|PCI device .* link is down")),
    (
        Kind.OOM,
        re.compile(r"[Oo]ut of memory: Kill|invoked oom-killer|\boom-kill:|\boom_reaper:"),
    ),
)
_KILLED = re.compile(r"[Oo]ut of memory: Kill(?:ed)? process (\d+) \(([^)]*)\)")
_PCI = re.compile(r"\b[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]\b")
_UNCORRECTED = re.compile(
    r"severity=Uncorrect|Uncorrect\w* (?:\(\S*\) )?error|AER: .*(?:[Ff]atal)|Link Down"
    r"|link is down|\bDPC: containment"
)


@dataclass(frozen=True, kw_only=True)
class KernelLine:
    """One line. `pci` holds every address in it, as `0000:17:00`; `pid` is one that was killed.

    `fatal`: an uncorrected error or a lost link; a corrected one and a mere message are not.
    `node`: whose kernel wrote it; empty where there is only this machine.
    """

    kind: Kind
    text: str
    xid: int | None = None
    pci: tuple[str, ...] = ()
    pid: int | None = None
    fatal: bool = False
    node: str = ""


def parse_line(text: str) -> KernelLine | None:
    """The line, or None if it concerns neither GPU, link nor memory.

    >>> line = parse_line("NVRM: Xid (PCI:0000:17:00): 79, GPU has fallen off the bus.")
    >>> line.kind.value, line.xid, line.pci
    ('xid', 79, ('0000:17:00',))
    >>> parse_line("EXT4-fs (vda): mounted filesystem")
    """
    kind = next((kind for kind, pattern in _KINDS if pattern.search(text)), None)
    if kind is None:
        return None
    found, killed = _XID.search(text), _KILLED.search(text)
    addresses = [found.group(1)] if found else _PCI.findall(text)
    fatal = {
        Kind.XID: True,
        Kind.SXID: "Non-fatal" not in text,
        Kind.PCIE: _UNCORRECTED.search(text) is not None,
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
    return line.kind is Kind.SXID or not slots or not line.pci or bool(set(line.pci) & set(slots))


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
