"""What an Xid means: the errors that NVIDIA's driver writes into the kernel log, by number.

Meanings and immediate actions are those of NVIDIA, "Analyzing Xid Errors with the Xid Catalog"
(docs.nvidia.com/deploy/xid-errors), for Ampere and newer; whether the program itself can be to
blame is from the listing in "XID Errors" there. Our words.
"""

from __future__ import annotations

from dataclasses import dataclass

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
