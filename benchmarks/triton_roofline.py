"""How long attention by the Triton kernels takes at a roofline: computed, never measured.

    python -m benchmarks.triton_roofline [--length 1024 ... 131072]    for all parts, beside dense
    python -m benchmarks.triton_roofline --kernels [--length 2048]     kernel by kernel
    python -m benchmarks.triton_roofline --forms                       the selected branch's forms
    python -m benchmarks.triton_roofline --write benchmarks/results/triton.md

Products and bytes are counted over the launch grids (`benchmarks.grids`), tiles' waste included,
for one layer and one sequence of the production shape in bf16, forward and backward. A kernel takes
the longer of its products at the data sheet's rate and its bytes at the data sheet's bandwidth;
kernels follow each other. Bytes are given twice: each tensor read or written once, and every tile
fetching what it reads from memory anew. Dense causal attention beside it has exactly the products
of its triangle and each tensor moved once. No kernel reaches a roofline: where both reach the same
share of it, ratios are as printed. Needs neither the package triton nor a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.grids import GPUS, Work, parts, selected
from nsa.attention.triton.selected.tiles import choose_cut
from nsa.config import NSAConfig

LENGTHS = tuple(1 << n for n in range(10, 18))
# At which the page shows every kernel.
SHOWN = (2048, 32_768)
_BEGIN, _END = "<!-- roofline: begin -->", "<!-- roofline: end -->"


def dense(cfg: NSAConfig, seq_len: int, size: int = 2) -> Iterator[Work]:
    """Flash attention, causal, with a key for each group: its least."""
    queries, keys = (
        seq_len * n * (cfg.d_k + cfg.d_v) * size for n in (cfg.n_heads, cfg.n_kv_groups)
    )
    # A product one number wide.
    one = 2 * cfg.n_heads * seq_len * (seq_len + 1) // 2
    sums = seq_len * cfg.n_heads * 4
    for backward, flops, moved in (
        (False, one * (cfg.d_k + cfg.d_v), queries + keys + sums),
        (True, one * (3 * cfg.d_k + 2 * cfg.d_v), 2 * queries + 2 * keys + 2 * sums),
    ):
        yield Work(kernel="dense", backward=backward, flops=flops, needed=flops, least=moved,
                   most=moved)  # fmt: skip


def of_training(cfg: NSAConfig, seq_len: int) -> dict[str, list[Work]]:
    """Work of all parts of a training step, by part."""
    return {name: list(parts()[name].work(cfg, seq_len)) for name in parts()}


def seconds(work: Sequence[Work], gpu: str) -> tuple[float, float]:
    """One kernel after the other, with the least and with the most bytes."""
    low, high = zip(*(one.seconds(gpu) for one in work), strict=True)
    return sum(low), sum(high)


def _milliseconds(work: Sequence[Work], gpu: str) -> str:
    low, high = (f"{1e3 * s:.3g}" for s in seconds(work, gpu))
    return low if low == high else f"{low} to {high}"


def whole_rows(lengths: Sequence[int]) -> Iterator[str]:
    """For each GPU: milliseconds of each part and of dense attention, forward and backward."""
    cfg = NSAConfig()
    found = {n: of_training(cfg, n) for n in lengths}
    names = list(found[lengths[0]])
    for gpu in GPUS:
        yield f"| {gpu}: S | {' | '.join(names)} | all, ms | dense, ms | dense / all | forward |"
        yield "|---" * (len(names) + 5) + "|"
        for seq_len, by_part in found.items():
            everything = [one for works in by_part.values() for one in works]
            forward = [one for one in everything if not one.backward]
            cells = [f"{seq_len:,}"]
            cells += [_milliseconds(works, gpu) for works in (*by_part.values(), everything)]
            beside = list(dense(cfg, seq_len))
            cells.append(f"{1e3 * seconds(beside, gpu)[0]:.3g}")
            cells += [_ratio(beside, everything, gpu), _ratio(beside[:1], forward, gpu)]
            yield f"| {' | '.join(cells)} |"
        yield ""


def _ratio(beside: Sequence[Work], ours: Sequence[Work], gpu: str) -> str:
    best, (low, high) = seconds(beside, gpu)[0], seconds(ours, gpu)
    return f"{best / high:.2f} to {best / low:.2f}"


def kernel_rows(lengths: Sequence[int]) -> Iterator[str]:
    """Kernel by kernel: products and how many of them are needed, bytes, milliseconds."""
    cfg = NSAConfig()
    yield f"| S | kernel | GFLOP | needed | MB | {', ms | '.join(GPUS)}, ms |"
    yield "|---" * (5 + len(GPUS)) + "|"
    for seq_len in lengths:
        for name, part in parts().items():
            for one in part.work(cfg, seq_len):
                kernel = one.kernel if one.kernel.startswith(name) else f"{name} {one.kernel}"
                needed = f"{one.needed / one.flops:.0%}" if one.flops and one.needed else "-"
                moved = f"{one.least / 1e6:,.1f} to {one.most / 1e6:,.1f}"
                times = " | ".join(_milliseconds([one], gpu) for gpu in GPUS)
                gflop = f"{one.flops / 1e9:,.2f}"
                yield f"| {seq_len:,} | {kernel} | {gflop} | {needed} | {moved} | {times} |"


def form_rows(lengths: Sequence[int]) -> Iterator[str]:
    """The selected branch's forward pass and dq in both forms, and which one is chosen."""
    cfg = NSAConfig()
    names = " | ".join(f"{gpu}: walking | by block" for gpu in GPUS)
    yield f"| S | {names} | chosen |"
    yield "|---" * (2 + 2 * len(GPUS)) + "|"
    for seq_len in lengths:
        both = [list(one) for one in selected.forms(cfg, seq_len)]
        cells = [_milliseconds(works, gpu) for gpu in GPUS for works in both]
        walks = choose_cut(cfg, seq_len, cfg.n_kv_groups).by_block is None
        yield f"| {seq_len:,} | {' | '.join(cells)} | {'walking' if walks else 'by block'} |"


def page() -> str:
    """What the documentation shows between its two marks."""
    return "\n".join((*whole_rows(LENGTHS), *kernel_rows(SHOWN)))


def rewritten(text: str) -> str:
    """A page's text with the tables as they are now."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{page()}\n{_END}{after}"


def main(words: Sequence[str]) -> int:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--length", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--kernels", action="store_true", help="kernel by kernel")
    parser.add_argument("--forms", action="store_true", help="the selected branch's two forms")
    parser.add_argument("--write", type=Path, help="a page with the two marks")
    args = parser.parse_args(words)
    if args.write:
        args.write.write_text(rewritten(args.write.read_text()))
        return 0
    rows = kernel_rows if args.kernels else form_rows if args.forms else whole_rows
    print(*rows(args.length), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
