"""The Triton kernels, compiled for a GPU that is not here, and what the assembler made of them."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.triton_aot.kernels import PARTS, Kernel, as_assumed
from benchmarks.triton_aot.loops import RATED, Loop, main_loop
from nsa.attention.triton import launch
from nsa.config import NSAConfig

SHORT, LONG = 2048, 131_072
# Batch of 2 x 2 kv groups.
PAIRS = 4
# By compute capability: bytes of shared memory that a program may take and that a multiprocessor
# has, programs and warps on a multiprocessor. CUDA C++ Programming Guide, technical specifications.
LIMITS = {
    80: (166_912, 167_936, 32, 64),
    90: (232_448, 233_472, 32, 64),
    100: (232_448, 233_472, 32, 64),
}
_REGISTERS = 65_536
# What one program takes of shared memory besides its own.
_RESERVED = 1024
TENSOR_CORES = ("HMMA", "HGMMA", "UTCHMMA")
# Loads and stores of a thread's own memory; a stack that nothing touches is the assembler's habit.
_SPILLS = re.compile(r"\b(LDL|STL)\b")
# Products that a wait follows: the last of a tile of 64 numbers or more, which is 4 products.
_WAITS = re.compile(r"\bHGMMA\b.*\bgsb0")
# Strides.
_ALIGNED = re.compile(r"\w+_[btghn]")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the assembler made of it. spilled: bytes of a thread's own memory.

    serialized: of Hopper's products, which run beside each other, most wait for the one before.
    loop: the one that multiplies, on devices whose rates are known.
    """

    kernel: Kernel
    capability: int
    registers: int
    spilled: int
    shared: int
    tensor_core: dict[str, int]
    atomics: int
    serialized: bool = False
    loop: Loop | None = None

    @property
    def programs(self) -> int:
        """Programs that a multiprocessor holds at once."""
        most, memory, programs, warps = LIMITS[self.capability]
        if self.shared > most:
            return 0
        # Registers are given to a warp in units of 256.
        of_warp = -(-self.registers * 32 // 256) * 256
        by_registers = _REGISTERS // (of_warp * self.kernel.warps)
        by_memory = memory // (self.shared + _RESERVED)
        return min(programs, warps // self.kernel.warps, by_registers, by_memory)

    @property
    def occupancy(self) -> float:
        """Share of a multiprocessor's warps."""
        return self.programs * self.kernel.warps / LIMITS[self.capability][3]

    @property
    def problems(self) -> list[str]:
        """What must not be."""
        found = []
        if self.spilled:
            found.append(f"{self.spilled} bytes of each thread are spilled")
        if not self.programs:
            found.append(f"{self.shared} bytes of shared memory fit no multiprocessor")
        if self.kernel.dots and not any(self.tensor_core.values()):
            found.append("no instruction of the tensor cores")
        if self.serialized:
            found.append("products of the tensor cores wait for each other")
        if self.atomics:
            found.append(f"{self.atomics} atomic operations")
        return found


def compile_kernel(kernel: Kernel, capability: int, dtype: str) -> Compiled:
    """Compile one kernel, and read the assembler's result."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.function.arg_names
    signature = {name: kernel.type_of(name, dtype) for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or _ALIGNED.fullmatch(name)
    }
    source = ASTSource(fn=kernel.function, signature=signature, constexprs=kernel.constants,
                       attrs=aligned)  # fmt: skip
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages}
    limit = launch.register_limit(capability // 10)
    options |= {} if limit is None else {"maxnreg": limit}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage, assembly = _inspect(made.asm["cubin"])
    return Compiled(
        kernel=kernel,
        capability=capability,
        registers=int(usage["REG"]),
        spilled=int(usage["STACK"]) + int(usage["LOCAL"]) if _SPILLS.search(assembly) else 0,
        shared=int(made.metadata.shared) + int(usage["SHARED"]),
        tensor_core={op: len(re.findall(rf"\b{op}\b", assembly)) for op in TENSOR_CORES},
        # In Triton's own language: the hardware's barriers are atomic operations too.
        atomics=len(re.findall(r"\btt\.atomic", made.asm["ttir"])),
        serialized=2 * len(_WAITS.findall(assembly)) > len(re.findall(r"\bHGMMA\b", assembly)),
        loop=main_loop(assembly, capability) if capability in RATED else None,
    )


def _inspect(cubin: bytes) -> tuple[dict[str, str], str]:
    """Resources by name, and the assembly, by the tools that come with triton."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = [
            subprocess.run([tools / tool, option, file.name], capture_output=True, check=True)
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        ]
    usage, assembly = (one.stdout.decode() for one in said)
    return dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)), assembly


def compile_all(
    capabilities: Sequence[int], widths: Sequence[int], names: Sequence[str]
) -> Iterator[tuple[int, Compiled]]:
    """Every kernel of the parts `names` that differs, each with its width."""
    for width, part in itertools.product(widths, names):
        cfg = NSAConfig(d_k=width, d_v=width)
        lengths = (PARTS[part](cfg, seq_len, PAIRS, as_assumed) for seq_len in (SHORT, LONG))
        for kernel, capability in itertools.product(distinct(lengths), capabilities):
            yield width, compile_kernel(kernel, capability, "bf16")


def distinct(lengths: Iterable[Iterable[Kernel]]) -> list[Kernel]:
    """The kernels of several lengths, each once."""
    found: list[Kernel] = []
    for kernel in itertools.chain.from_iterable(lengths):
        if kernel not in found:
            found.append(kernel)
    return found


def choices(path: Path) -> Iterator[tuple[Kernel, int]]:
    """Every kernel that runs on a device because its file says so, with the capability.

    ValueError: of another shape than the production's, the file says nothing of these kernels.
    """
    document, cfg = json.loads(path.read_text("utf-8")), NSAConfig()
    if document["shapes"] != launch.shapes_of(cfg, itemsize=2):
        raise ValueError(f"{path}: measured for other shapes than the production's")
    capability = int(document["capability"].replace(".", ""))
    measured = ((branch, int(at)) for branch, made in document["choices"].items() for at in made)
    for kernel in distinct(_put_in_place(document, branch, at, cfg) for branch, at in measured):
        yield kernel, capability


def _put_in_place(
    document: dict[str, Any], branch: str, seq_len: int, cfg: NSAConfig
) -> list[Kernel]:
    """Kernels of a branch, and of all together, that are others with its choices than without."""
    parts = PARTS["compressed" if branch == "top" else branch], PARTS["core"]

    def kernels(made: dict[str, Any]) -> list[Kernel]:
        def adjust(of: str, cut: Any) -> Any:
            return launch.put(cut, made) if of == branch else cut

        return [one for make in parts for one in make(cfg, seq_len, PAIRS, adjust)]

    assumed = kernels({})
    return [
        kernel
        for kernel in kernels(launch.nearest(document, branch, seq_len))
        if kernel not in assumed
    ]


def compile_tuned() -> Iterator[tuple[int, Compiled]]:
    """Every choice of every device's file, with its width."""
    for path in sorted(launch.FOLDER.glob("*.json")):
        for kernel, capability in choices(path):
            yield NSAConfig().d_k, compile_kernel(kernel, capability, "bf16")
