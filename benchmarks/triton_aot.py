"""The Triton kernels of the selected branch, compiled for GPUs that are not here.

    python -m benchmarks.triton_aot [--capability 80 90 100] [--width 64 128] [--type bf16 fp16]
    python -m benchmarks.triton_aot --roofline

The first compiles every kernel as `nsa.attention.triton.tiles` cuts the production shape (12 query
heads, 2 groups; S = 2,048 and 131,072), and reads what the assembler made of it: registers, spills,
shared memory, programs that fit a multiprocessor, instructions of the tensor cores. It exits with 1
where a kernel spills, does not fit, has no such instruction or an atomic one.

The second counts products and bytes over the launch grid, and what follows for the time: computed,
not measured. Needs the package triton, and no GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.attention.triton.tiles import Cut, Tile, choose_cut, expected_union, padded
from nsa.config import NSAConfig

LENGTHS = tuple(1 << n for n in range(10, 18))
SHORT, LONG = 2048, 131_072
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
# Products in bf16 without sparsity, TFLOP/s, and memory, GB/s: data sheets.
GPUS = {"A100 SXM": (312, 2039), "H200": (989, 4800)}
_POINTERS = {
    "bits": "i32", "lse": "fp32", "delta": "fp32", "parts": "fp32", "ranges": "i64",
    "counts": "i32", "offsets": "i32", "readers": "i32", "piece_ends": "i32",
}  # fmt: skip
_TENSORS = ("q", "k", "v", "out", "grad", "dq", "dk", "dv")
_ALIGNED = re.compile(r"[qkv]_[btgh]")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel as it is compiled: its function, its constants, its options."""

    name: str
    function: Any
    constants: dict[str, int]
    warps: int
    stages: int
    dots: bool = True


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the assembler made of it. spilled: bytes of a thread's own memory."""

    kernel: Kernel
    capability: int
    registers: int
    spilled: int
    shared: int
    tensor_core: dict[str, int]
    atomics: int

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
        if self.atomics:
            found.append(f"{self.atomics} atomic operations")
        return found


def kernels(cfg: NSAConfig, seq_len: int, pairs: int = 4) -> Iterator[Kernel]:
    """Every kernel, as a call of this shape would launch it."""
    from nsa.attention.triton import columns, index, launch, rows

    cut, shape = choose_cut(cfg, seq_len, pairs), launch.shape_constants(cfg)
    walk = {"EVERY": cut.every}
    block, l_sel = cfg.n_blocks(seq_len), {"L_SEL": cfg.l_sel}
    yield Kernel(
        name="pack", function=index.pack_kernel, warps=4, stages=1, dots=False,
        constants={**l_sel, "N_SEL": cfg.n_sel, "PLACES": 1 << (cfg.n_sel - 1).bit_length(),
                   "TOKENS": launch.TOKENS},
    )  # fmt: skip
    for fill in (False, True):
        yield Kernel(
            name=f"list{' (fill)' * fill}", function=index.list_kernel, warps=4, stages=1,
            dots=False, constants={**l_sel, "TOKENS": launch.TOKENS_OF_A_LIST, "FILL": fill},
        )  # fmt: skip
    tiles: tuple[tuple[str, Any, Tile, dict[str, int]], ...] = (
        ("forward", rows.forward_kernel, cut.forward, walk),
        ("dq", rows.query_gradient_kernel, cut.query_gradient, walk),
        ("dk, dv", columns.piece_kernel, cut.key_gradient,
         {"PIECE": cut.piece, "BLOCKS": 1 << (block - 1).bit_length()}),
    )  # fmt: skip
    for name, function, tile, more in tiles:
        yield Kernel(
            name=f"{name}, {tile.rows} rows{', every block' * bool(more.get('EVERY'))}",
            function=function, warps=tile.warps, stages=tile.stages,
            constants={**shape, **more, "ROWS": tile.rows},
        )  # fmt: skip
    rest = {name: value for name, value in shape.items() if name != "HEADS"}
    yield Kernel(name="sum", function=columns.sum_kernel, constants=rest, warps=4, stages=3,
                 dots=False)  # fmt: skip


def compile_kernel(kernel: Kernel, capability: int, dtype: str) -> Compiled:
    """Compile one kernel, and read the assembler's result."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.function.arg_names
    signature = {name: _type(name, kernel, dtype) for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or _ALIGNED.fullmatch(name)
    }
    source = ASTSource(fn=kernel.function, signature=signature, constexprs=kernel.constants,
                       attrs=aligned)  # fmt: skip
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32),
        options={"num_warps": kernel.warps, "num_stages": kernel.stages},
    )  # fmt: skip
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
    )


def _type(name: str, kernel: Kernel, dtype: str) -> str:
    if name in kernel.constants:
        return "constexpr"
    if name in _TENSORS:
        return f"*{dtype}"
    if name in _POINTERS:
        return f"*{_POINTERS[name]}"
    return "fp32" if name.endswith("scale") else "i32"


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


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of one layer and sequence: products in FLOPs, bytes at least and without any cache."""

    flops: float
    least: float
    most: float

    def seconds(self, gpu: str) -> tuple[float, float]:
        """Roofline, with the least and with the most bytes."""
        tera, giga = GPUS[gpu]
        products = self.flops / (tera * 1e12)
        return tuple(max(products, n / (giga * 1e9)) for n in (self.least, self.most))  # type: ignore[return-value]


def work(cfg: NSAConfig, seq_len: int, size: int = 2) -> tuple[Work, Work]:
    """Forward and backward, over the launch grid; size: bytes of a number."""
    cut = choose_cut(cfg, seq_len, cfg.n_kv_groups)
    width = padded(cfg.d_k) + padded(cfg.d_v)
    block = padded(cfg.l_sel)
    queries, keys = (
        seq_len * n * (cfg.d_k + cfg.d_v) * size for n in (cfg.n_heads, cfg.n_kv_groups)
    )
    bits = cfg.n_kv_groups * -(-cfg.n_blocks(seq_len) // 32) * seq_len * 4
    sums = seq_len * cfg.n_heads * 4
    walked, walked_dq = (_walked(cfg, seq_len, t, cut) for t in (cut.forward, cut.query_gradient))
    forward = Work(
        flops=walked * cut.forward.rows * block * width * 2,
        least=queries + keys + bits + sums,
        most=queries + bits + sums + walked * block * width * size,
    )
    read = cfg.n_kv_groups * _read(cfg, seq_len)
    parts = cfg.n_kv_groups * min(cut.n_pieces, cfg.n_blocks(seq_len) + read / cut.piece) * block
    pieces = parts * width * 4 * 2 + 2 * keys + read * 4 * 2
    of_dq = walked_dq * cut.query_gradient.rows * block * (2 * padded(cfg.d_k) + padded(cfg.d_v))
    gathered = read * cfg.heads_per_group
    backward = Work(
        flops=2 * (of_dq + gathered * block * 2 * width),
        least=3 * queries + 2 * keys + 3 * bits + 4 * sums + pieces,
        most=3 * queries + 3 * bits + 4 * sums + pieces + walked_dq * block * width * size
        + gathered * (width * size + 8),
    )  # fmt: skip
    return forward, backward


def _walked(cfg: NSAConfig, seq_len: int, tile: Tile, cut: Cut) -> float:
    """Blocks that all tiles walk over; tokens that draw their own blocks, as the cost model has."""
    total = 0.0
    tiles = -(-seq_len * cfg.heads_per_group // tile.rows)
    for number in range(tiles):
        last = min(((number + 1) * tile.rows - 1) // cfg.heads_per_group, seq_len - 1)
        first = number * tile.rows // cfg.heads_per_group
        visible = cfg.n_blocks(last + 1)
        total += visible if cut.every else expected_union(cfg, last + 1, last - first + 1)
    return total * cfg.n_kv_groups


def _read(cfg: NSAConfig, seq_len: int) -> int:
    """Blocks that the tokens of a group read, one by one."""
    return sum(min(cfg.n_sel, t // cfg.l_sel + 1) for t in range(seq_len))


def roofline_rows() -> Iterator[str]:
    """The table of the documentation."""
    yield (
        "| S | rows, walk | GFLOP | GB, least to no cache | "
        + " | ".join(f"{gpu}, ms" for gpu in GPUS)
        + " |"
    )
    yield "|---" * (4 + len(GPUS)) + "|"
    cfg = NSAConfig()
    for seq_len in LENGTHS:
        cut = choose_cut(cfg, seq_len, cfg.n_kv_groups)
        both = work(cfg, seq_len)
        cells = []
        for gpu in GPUS:
            times = [" to ".join(f"{1e3 * s:.2g}" for s in one.seconds(gpu)) for one in both]
            cells.append(f"{times[0]}; {times[1]}")
        walk = "every block" if cut.every else "union"
        gflop = "; ".join(f"{one.flops / 1e9:,.0f}" for one in both)
        moved = "; ".join(f"{one.least / 1e9:.2g} to {one.most / 1e9:.2g}" for one in both)
        what = f"{cut.forward.rows}, {walk}"
        yield f"| {seq_len:,} | {what} | {gflop} | {moved} | {' | '.join(cells)} |"


def compiled_rows(found: Sequence[tuple[int, Compiled]]) -> Iterator[str]:
    """The table of what was compiled; each with the head's width."""
    yield "| kernel | width | capability | warps | registers | spilled | shared | occupancy | " \
        "tensor cores |"  # fmt: skip
    yield "|---" * 9 + "|"
    for width, one in found:
        cores = ", ".join(f"{n} {op}" for op, n in one.tensor_core.items() if n) or "-"
        yield (
            f"| {one.kernel.name} | {width} | {one.capability / 10:g} | {one.kernel.warps} | "
            f"{one.registers} | {one.spilled} | {one.shared:,} | {one.occupancy:.0%} | {cores} |"
        )


def compile_all(
    capabilities: Sequence[int], widths: Sequence[int], types: Sequence[str]
) -> Iterator[tuple[int, Compiled]]:
    """Every kernel that differs, once for each type."""
    for width in widths:
        cfg = NSAConfig(d_k=width, d_v=width)
        known = []
        for seq_len in (SHORT, LONG):
            for kernel in kernels(cfg, seq_len):
                if kernel in known:
                    continue
                known.append(kernel)
                for capability in capabilities:
                    for dtype in types:
                        yield width, compile_kernel(kernel, capability, dtype)


def main(words: Sequence[str]) -> int:
    """Print a table; 1 where something must not be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90], choices=LIMITS)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--type", nargs="+", default=["bf16"], choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--roofline", action="store_true")
    args = parser.parse_args(words)
    if args.roofline:
        print(*roofline_rows(), sep="\n")
        return 0
    found = list(compile_all(args.capability, args.width, args.type))
    print(*compiled_rows(found), sep="\n")
    wrong = [
        f"{one.kernel.name}, width {width}, {one.capability}: {text}"
        for width, one in found
        for text in one.problems
    ]
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
