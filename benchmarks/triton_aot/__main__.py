"""The Triton kernels, compiled for GPUs that are not here.

    python -m benchmarks.triton_aot [--capability 80 90 100] [--width 64 128]
        [--part selected ...]
    python -m benchmarks.triton_aot --tuned

Compiles every kernel of `kernels` as it is cut for the production shape in bfloat16 (12 query
heads, 2 groups; S = 2,048 and 131,072), and reads what the assembler made of it: registers, spills,
shared memory, programs that fit a multiprocessor, instructions of the tensor cores. It exits with 1
where a kernel spills, does not fit, has no such instruction or an atomic one, or where its products
wait for each other. --tuned: the kernels that the files of nsa/attention/triton/tuned put in their
place, each for its device's capability. The last two columns are the share of the tensor cores that
the main loop can use at most, and what bounds it (`loops` has the model). Needs the package triton,
and no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.program import markdown_table
from benchmarks.triton_aot.compiled import LIMITS, Compiled, compile_all, compile_tuned
from benchmarks.triton_aot.kernels import PARTS

HEADER = ("kernel", "width", "capability", "warps", "registers", "spilled", "shared", "occupancy",
          "tensor cores", "bound", "by")  # fmt: skip


def row_of(width: int, one: Compiled) -> tuple[object, ...]:
    """A kernel in the table."""
    cores = ", ".join(f"{n} {op}" for op, n in one.tensor_core.items() if n) or "-"
    uses = (one.registers, one.spilled, f"{one.shared:,}", f"{one.occupancy:.0%}", cores)
    loop = ("-", "-") if one.loop is None else (f"{one.loop.bound:.0%}", one.loop.busiest)
    return one.kernel.name, width, f"{one.capability / 10:.1f}", one.kernel.warps, *uses, *loop


def main(words: Sequence[str]) -> int:
    """Print a table; 1 where something must not be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90], choices=LIMITS)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--tuned", action="store_true", help="what was measured on devices")
    args = parser.parse_args(words)
    asked = args.capability, args.width, args.part
    found = list(compile_tuned() if args.tuned else compile_all(*asked))
    print(markdown_table(HEADER, [row_of(width, one) for width, one in found]))
    wrong = [
        f"{one.kernel.name}, width {width}, {one.capability}: {text}"
        for width, one in found
        for text in one.problems
    ]
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
