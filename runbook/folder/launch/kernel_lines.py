"""Lines of the kernel log that concern a launch: errors of GPUs and of their links, lack of memory.

A line is kept as the kernel wrote it, and read again from its text whenever it is judged.

What an Xid means, and its immediate action, is from NVIDIA, "Analyzing Xid Errors with the Xid
Catalog" (docs.nvidia.com/deploy/xid-errors), for Ampere and newer; whether the program itself can
be to blame is from the listing in "XID Errors" there. Our words.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum


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
    """

    kind: Kind
    text: str
    xid: int | None = None
    pci: tuple[str, ...] = ()
    pid: int | None = None
    fatal: bool = False


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


@dataclass(frozen=True)
class Xid:
    """One number.

    `hardware`: card, link or driver is to blame, never the program that trains. `ends`: what runs
    on the GPU cannot go on; the others are only told.
    """

    meaning: str
    remedy: str
    hardware: bool
    ends: bool = True


_RESTART = "restart the program; if it comes back, look for its wrong memory access"
_RESET = "reset the GPU (nvidia-smi -r on an idle one) or reboot; if it comes back, replace it"
_SUPPORT = "run the vendor's field diagnostics"
_NVLINK = "read `nvidia-smi nvlink -e`, reseat the bridge or reset the GPUs"

XIDS: dict[int, Xid] = {
    8: Xid("GPU stopped processing", _RESTART, False),
    13: Xid("graphics engine exception", _RESTART, False),
    31: Xid("GPU memory page fault (MMU)", _RESTART, False),
    32: Xid("invalid or corrupted push buffer stream", _RESTART, False),
    43: Xid("GPU stopped processing for one program", _RESTART, False),
    45: Xid("preemptive cleanup after an earlier error", "look at the Xid before it", False),
    46: Xid("GPU stopped processing", _RESET, True),
    48: Xid("double bit ECC error: uncorrectable", _RESET, True),
    61: Xid("internal microcontroller breakpoint", _RESET, True),
    62: Xid("internal microcontroller halt", _RESET, True),
    63: Xid(
        "row remapping or page retirement recorded",
        "reset the GPU to activate it",
        True,
        ends=False,
    ),
    64: Xid("row remapping or page retirement failed", _RESET, True),
    68: Xid("video decoder exception", _RESTART, False),
    69: Xid("graphics engine class error", _RESTART, False),
    74: Xid("NVLink error", _NVLINK, True),
    79: Xid("GPU has fallen off the bus", "reboot; check power, seating and the PCIe slot", True),
    92: Xid("high rate of single bit ECC errors", _SUPPORT, True, ends=False),
    94: Xid("contained memory error: uncorrectable", "restart; reset the GPU soon", True),
    95: Xid("uncontained memory error: uncorrectable", _RESET, True),
    109: Xid("context switch timeout", _RESET, True),
    110: Xid("security fault", _RESET, True),
    119: Xid("GSP RPC timeout: the card's own processor does not answer", _RESET, True),
    120: Xid("GSP error: the card's own processor failed", _RESET, True),
    121: Xid("C2C link error", _SUPPORT, True, ends=False),
    136: Xid("link training failed", _NVLINK, True),
    140: Xid("unrecovered ECC error", _RESET, True),
    143: Xid("GPU initialization error", _RESET, True),
    **{number: Xid("NVLink error (fifth generation)", _NVLINK, True) for number in range(144, 151)},
    154: Xid(
        "GPU recovery action changed", "do what the line asks for (reset, reboot)", True, ends=False
    ),
    155: Xid("NVLink error, defined by software", _NVLINK, True),
    156: Xid("resource retired", "reset the GPU to activate it", True, ends=False),
    157: Xid("retirement of a resource failed", _SUPPORT, True, ends=False),
    158: Xid("fatal timeout of the GPU", _RESET, True),
    167: Xid("fatal PCIe timeout", "check power, seating and the PCIe slot", True),
    171: Xid("uncorrectable DRAM error", _RESET, True),
    172: Xid("uncorrectable SRAM error", _RESET, True),
}


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
