"""How near a kernel's inner loops can come to a bound, by counting their instructions.

A multiprocessor has four parts; each starts one instruction of a warp in a cycle, and has pipes
that take several cycles for one (CUDA C++ Programming Guide, arithmetic throughput; data sheets for
the tensor cores). Counted over one turn of a loop, as a warp runs it, that gives the cycles of each
pipe. Were they all busy side by side, the longest would decide (`best`); were the tensor cores idle
while anything else starts, their share would be `worst`. A loop without products is held against
the memory's bandwidth in the same way. Waiting is not counted: not for a barrier, not for memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_HGMMA = re.compile(r"\.64x(\d+)x(\d+)\.")
_HMMA = re.compile(r"\.16(8)(16|8)\.")
# Cycles of one warp's instruction in a part of a multiprocessor, by compute capability.
_FLOAT = {80: 2, 90: 1}
_OTHER, _SPECIAL = 2, 8
_FLOATS = ("FADD", "FMUL", "FFMA")
_WHOLE = ("IADD3", "LOP3", "ISETP", "FSETP", "IMNMX", "FMNMX", "SEL", "FSEL", "SHF", "LEA", "PRMT",
          "F2FP", "VIADD", "PLOP3")  # fmt: skip
# Capabilities whose instructions are known here.
COUNTED = (80, 90)
# Products and sums in a cycle of a part's tensor core, numbers of 16 bits.
_DENSE = {80: 256, 90: 512}
# Bytes of shared memory in a cycle of a multiprocessor, all of whose four parts wait for it.
_SHARED_BYTES, _PARTS = 128, 4
# Bytes of memory in a cycle of a part: the data sheet's bandwidth over parts and the clock that its
# products take (A100 1.41 GHz, 108 multiprocessors; H200 1.83 GHz, 132).
_MEMORY = {80: 2039 / (108 * 1.41 * 4), 90: 4800 / (132 * 1.83 * 4)}


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One turn of an innermost loop: cycles of each pipe of a part, with `start` for all."""

    products: bool
    cycles: dict[str, float]

    @property
    def bound(self) -> float:
        """Cycles of what the kernel is held against: tensor cores, or memory."""
        return self.cycles["tensor" if self.products else "memory"]

    @property
    def best(self) -> float:
        """Share of the bound if every pipe is busy side by side."""
        return self.bound / self.cycles[self.longest]

    @property
    def worst(self) -> float:
        """Share if nothing else starts while the bound's pipe is busy."""
        return self.bound / (self.bound + self.cycles["start"])

    @property
    def longest(self) -> str:
        """The pipe that decides."""
        # Tiles that are multiplied come from the second-level cache, of which nothing is published.
        pipes = {name for name in self.cycles if not (self.products and name == "memory")}
        return max(pipes, key=self.cycles.__getitem__)


def loops(assembly: str, capability: int) -> list[Loop]:
    """Innermost loops that multiply, or else those that read memory; in the order of the code."""
    lines = [_read(line) for line in assembly.splitlines()]
    places = {label: n for n, (label, _, _) in enumerate(lines) if label}
    spans = []
    for end, (_, name, rest) in enumerate(lines):
        target = _TARGET.search(rest) if name.startswith("BRA") else None
        begin = places.get(target.group(1), end) if target else end
        if begin < end - 1:
            spans.append((begin, end))
    inner = [
        one for one in spans
        if not any(one != other and one[0] <= other[0] and other[1] <= one[1] for other in spans)
    ]  # fmt: skip
    found = [_counted([x[1] for x in lines[a : b + 1] if x[1]], capability) for a, b in inner]
    multiplying = [one for one in found if one.products]
    return multiplying or [one for one in found if one.cycles["memory"]]


def _read(line: str) -> tuple[str, str, str]:
    """Label, instruction and its operands; what is missing is empty."""
    label = _LABEL.match(line)
    found = _INSTRUCTION.search(line)
    name, rest = found.groups() if found else ("", "")
    return (label.group(1) if label else "", name, rest)


def _counted(names: list[str], capability: int) -> Loop:
    cycles = dict.fromkeys(
        ("tensor", "start", "float", "other", "special", "shared", "memory"), 0.0
    )
    for name in names:
        cycles["start"] += 1
        for pipe, taken in _pipes(name, capability):
            cycles[pipe] += taken
    return Loop(products=bool(cycles["tensor"]), cycles=cycles)


def _pipes(name: str, capability: int) -> Iterator[tuple[str, float]]:
    """Cycles that an instruction of one warp takes of the pipes of its part."""
    kind = name.partition(".")[0]
    if kind == "HGMMA" and (shape := _HGMMA.search(name)):
        # Four warps, one in each part, multiply 64 rows together.
        yield "tensor", 16 * int(shape[1]) * int(shape[2]) / _DENSE[capability]
    elif kind == "HMMA" and (shape := _HMMA.search(name)):
        yield "tensor", 16 * 8 * int(shape[2]) / _DENSE[capability]
    elif kind in _FLOATS:
        yield "float", _FLOAT[capability]
    elif kind in _WHOLE:
        yield "other", _OTHER
    elif kind == "MUFU":
        yield "special", _SPECIAL
    elif kind in ("LDS", "LDSM", "STS", "STSM"):
        yield "shared", 32 * _bytes(name) * _PARTS / _SHARED_BYTES
    elif kind in ("LDG", "STG", "LDGSTS"):
        yield "memory", 32 * _bytes(name) / _MEMORY[capability]


def _bytes(name: str) -> int:
    """Of one thread; a matrix of 8 x 8 numbers is four bytes of each."""
    if name.startswith(("LDSM", "STSM")):
        count = name.rpartition(".")[2]
        return 4 * int(count) if count.isdigit() else 4
    for size, word in ((16, ".128"), (8, ".64"), (2, ".U16"), (1, ".U8")):
        if word in name:
            return size
    return 4
