"""Names that NCCL reads: one that it does not read is ignored in silence, whatever its value.

From NCCL 2.30.7 (github.com/NVIDIA/nccl): what `docs/userguide/source/env.rst` documents, and what
the code reads besides. A newer NCCL may read more, so an unknown name is a note; one that differs
from a known one by a slip of the hand is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.resources import files

PREFIX = "NCCL_"
VERSION = "2.30.7"


@cache
def known() -> frozenset[str]:
    """Every name that NCCL reads, as `nccl.txt` lists them."""
    text = (files("runbook.config") / "nccl.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return frozenset(f"{PREFIX}{name}" for line in lines for name in line.split())


def mistyped(names: Iterable[str]) -> dict[str, str]:
    """Of these names each that is a known one but for one slip, and the known one."""
    found = {}
    for name in _unknown(names):
        near = sorted(other for other in known() if _one_slip(name, other))
        if near:
            found[name] = near[0]
    return found


def unknown_note(name: str) -> str:
    """That NCCL may ignore this variable, in words; empty for any other name."""
    if not _unknown([name]):
        return ""
    return f"no name that NCCL {VERSION} reads: another version may, or it is ignored"


def _unknown(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(PREFIX) and name not in known()]


def _one_slip(name: str, known: str) -> bool:
    """One letter too many, too few or another one, or two neighbors that changed places."""
    short, long = sorted((name, known), key=len)
    same = 0
    while same < len(short) and short[same] == long[same]:
        same += 1
    rest, other = short[same:], long[same:]
    if len(long) == len(short) + 1:
        return rest == other[1:]
    if len(long) != len(short):
        return False
    swapped = rest[1:2] + rest[:1] + rest[2:]
    return rest[1:] == other[1:] or swapped == other
