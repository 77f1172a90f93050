"""What a call of the Triton kernels launches: kernels as they are compiled, work over their grids.

A module of this package is a part of attention (`selected`, `window`, ...). It has

    kernels(cfg, seq_len, pairs) -> Iterator[Kernel]   what is compiled; pairs = batch x kv groups
    work(cfg, seq_len, size=2) -> Iterator[Work]       one layer, one sequence; size of a number

`benchmarks.triton_aot` finds the modules by themselves, compiles the kernels and adds up the work.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

# Products in bf16 without sparsity, TFLOP/s, and memory, GB/s: data sheets.
GPUS = {"A100 SXM": (312, 2039), "H200": (989, 4800)}
# Arguments that point to numbers of the call's own type.
_TENSORS = ("q", "k", "v", "out", "grad", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel as it is compiled: its function, its constants, its options.

    pointers: Triton's type of each argument that points to something else than the call's type.
    own: further arguments that point to numbers of the call's type.
    dots: it multiplies on tensor cores.
    """

    name: str
    function: Any
    constants: dict[str, Any]
    warps: int
    stages: int
    dots: bool = True
    pointers: Mapping[str, str] = field(default_factory=dict)
    own: tuple[str, ...] = ()

    def type_of(self, argument: str, dtype: str) -> str:
        """Triton's word for the type of an argument, in a call of type `dtype`."""
        if argument in self.constants:
            return "constexpr"
        if argument in self.pointers:
            return f"*{self.pointers[argument]}"
        if argument in (*_TENSORS, *self.own):
            return f"*{dtype}"
        return "fp32" if argument.endswith("scale") else "i32"


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of one kernel, over its launch grid, for one layer and one sequence.

    flops: products on tensor cores, with what tiles pad and mask. needed: those that the equations
    ask for. least: bytes if each tensor is read and written once. most: if every tile fetches what
    it reads from memory anew.
    """

    kernel: str
    backward: bool
    flops: float
    needed: float
    least: float
    most: float

    def seconds(self, gpu: str) -> tuple[float, float]:
        """Roofline, with the least and with the most bytes."""
        tera, giga = GPUS[gpu]
        low, high = (
            max(self.flops / (tera * 1e12), n / (giga * 1e9)) for n in (self.least, self.most)
        )
        return low, high


def parts() -> dict[str, ModuleType]:
    """The modules of this package, by name."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}
