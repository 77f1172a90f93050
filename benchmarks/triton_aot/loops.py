"""How much of the tensor cores a kernel's main loop can use at most, read from its assembly.

The main loop is the innermost one with the most tensor-core work. A part of a multiprocessor issues
one instruction of a warp in each cycle, and each of its pipes takes some cycles for one. The bound
is the cycles in which the tensor cores compute at the device's peak, as a share of those that the
busiest of issue and pipes needs for one round.

Sources: the cycles of arithmetic are those of the CUDA C++ Programming Guide, table "Throughput of
Native Arithmetic Instructions": results a clock of a multiprocessor, over 4 parts and 32 lanes.
Tensor cores: the data sheets' dense bf16 over multiprocessors and clock, 2,048 FLOPs a cycle on
8.0 (312e12 / 108 / 1.41e9) and 4,096 on 9.0 (989e12 / 132 / 1.83e9). On 9.0 HMMA reaches 62 % of
that only (Luo et al., arXiv 2402.13499). Loads and stores: 32 lanes of a multiprocessor.

Limits: it knows no latency, no wait, no conflict of banks, no cache and no DRAM, and takes every
instruction of the loop as executed once, so a branch that is seldom taken counts in full. It says
what a loop cannot exceed, never what it reaches.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

PARTS = 4
# FLOPs of a multiprocessor in a cycle, bf16 into float32.
_PEAK = {80: 2048, 90: 4096}
RATED = tuple(_PEAK)
# On what share of the peak HMMA runs.
_HMMA_SHARE = {80: 1.0, 90: 0.62}
# Cycles of a part for one instruction of a warp, by pipe: the first that fits the name.
_PIPES: dict[int, tuple[tuple[str, str, float], ...]] = {
    capability: (
        ("special", r"MUFU\b", 8),
        ("memory", r"(LDG|STG|LDS|STS|LDSM|STSM|LDGSTS|LDL|STL|SHFL|RED|ATOM)\b", 4),
        # A multiplication of integers runs where floating-point numbers are multiplied.
        ("float", r"(FADD|FMUL|FFMA|IMAD|FSEL)\b", fp32),
        ("integer", r"(F2FP|F2F|I2F|I2FP|F2I|IADD3|VIADD|LEA|LOP3|PRMT|SHF|SEL|ISETP|FSETP|FMNMX"
         r"|IMNMX|VIMNMX|PLOP3|POPC|FLO|MOV|IABS|LOP|P2R|R2P)\b", 2),
    )
    for capability, fp32 in ((80, 2), (90, 1))
}  # fmt: skip
_LABEL = re.compile(r"^(\.L_x_\d+):")
_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_SHAPE = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)|HMMA\.168(4|8|16)\.")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One round of a loop in a part of a multiprocessor, for one warp. Cycles of each pipe.

    tensor: those at the device's peak; `pipes` has what they really take.
    """

    tensor: float
    instructions: int
    pipes: dict[str, float]

    @property
    def busiest(self) -> str:
        """Which of issue and pipes needs the most cycles."""
        return max(self.pipes, key=lambda name: self.pipes[name])

    @property
    def bound(self) -> float:
        """The share of the tensor cores' peak that no run of the loop exceeds."""
        return self.tensor / self.pipes[self.busiest]


def main_loop(assembly: str, capability: int) -> Loop | None:
    """The innermost loop with the most work of tensor cores; None without one.

    assembly: of `nvdisasm -c`. Raises KeyError for a capability whose rates are not known here.
    """
    found = [_round(body, capability) for body in _innermost(assembly)]
    return max(found, key=lambda loop: loop.tensor, default=None)


def _innermost(assembly: str) -> list[list[tuple[str, str]]]:
    """Bodies of loops that multiply and have no such loop inside: (opcode, operands)."""
    labels: dict[str, int] = {}
    code: list[tuple[str, str]] = []
    spans: list[tuple[int, int]] = []
    for line in assembly.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif told := _LINE.match(line):
            code.append((told[1], told[2]))
            target = _TARGET.search(told[2]) if told[1].startswith("BRA") else None
            if target is not None and target[1] in labels:
                spans.append((labels[target[1]], len(code)))
    busy = [span for span in spans if any(_flops(one) for one in code[slice(*span)])]
    return [
        code[slice(*span)]
        for span in busy
        if not any(o != span and span[0] <= o[0] and o[1] <= span[1] for o in busy)
    ]


def _flops(one: tuple[str, str]) -> float:
    """FLOPs of a multiprocessor's four parts for one instruction in each; 0 of all others."""
    shape = _SHAPE.search(one[0] + ".")
    if shape is None:
        return 0
    # TF32 counts twice, at half the rate.
    each = 4.0 if "TF32" in one[0] else 2.0
    if shape[1]:
        return each * int(shape[1]) * int(shape[2]) * int(shape[3])
    # HMMA.16816 is 16 x 8 x 16, and each part has a warp of its own.
    return each * 16 * 8 * int(shape[4]) * PARTS


def _round(body: list[tuple[str, str]], capability: int) -> Loop:
    pipes: Counter[str] = Counter()
    tensor = 0.0
    for one in body:
        pipes["issue"] += 1
        if flops := _flops(one):
            cycles = flops / _PEAK[capability]
            tensor += cycles
            slow = one[0].startswith("HMMA")
            pipes["tensor"] += cycles / (_HMMA_SHARE[capability] if slow else 1.0)
            continue
        for name, pattern, cycles in _PIPES[capability]:
            if re.match(pattern, one[0]):
                pipes[name] += cycles
                break
    return Loop(tensor=tensor, instructions=len(body), pipes=dict(pipes))
