"""How long attention by the Triton kernels takes at a roofline: computed, never measured.

    python -m benchmarks.triton_roofline [--length 1024 ... 131072]

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

from benchmarks.grids import GPUS, Work, parts
from nsa.config import NSAConfig

LENGTHS = tuple(1 << n for n in range(10, 18))
# Of no training step.
_APART = ("decode",)


def dense(cfg: NSAConfig, seq_len: int, size: int = 2) -> Iterator[Work]:
    """Flash attention, causal, with a key for each group: its least."""
    queries, keys = (
        seq_len * n * (cfg.d_k + cfg.d_v) * size for n in (cfg.n_heads, cfg.n_kv_groups)
    )
    # A product one number wide.
    one = 2 * cfg.n_heads * seq_len * (seq_len + 1) // 2
    forward, backward = one * (cfg.d_k + cfg.d_v), one * (3 * cfg.d_k + 2 * cfg.d_v)
    sums = seq_len * cfg.n_heads * 4
    moved, moved_back = queries + keys + sums, 2 * queries + 2 * keys + 2 * sums
    yield Work(kernel="forward", backward=False, flops=forward, needed=forward, least=moved,
               most=moved)  # fmt: skip
    yield Work(kernel="backward", backward=True, flops=backward, needed=backward, least=moved_back,
               most=moved_back)  # fmt: skip


def sparse(cfg: NSAConfig, seq_len: int) -> dict[str, list[Work]]:
    """Work of all parts of a training step, by part."""
    return {
        name: list(part.work(cfg, seq_len)) for name, part in parts().items() if name not in _APART
    }


def seconds(work: Sequence[Work], gpu: str) -> tuple[float, float]:
    """One kernel after the other, with the least and with the most bytes."""
    low, high = zip(*(one.seconds(gpu) for one in work), strict=True)
    return sum(low), sum(high)


def rows(lengths: Sequence[int]) -> Iterator[str]:
    """The table of the documentation: milliseconds forward and backward, by part."""
    cfg = NSAConfig()
    names = list(sparse(cfg, lengths[0]))
    head = [f"{gpu}: {name}" for gpu in GPUS for name in (*names, "all", "dense", "dense / all")]
    yield f"| S | GFLOP, needed of it | {' | '.join(head)} |"
    yield "|---" * (2 + len(head)) + "|"
    for seq_len in lengths:
        by_part = sparse(cfg, seq_len)
        everything = [one for found in by_part.values() for one in found]
        beside = list(dense(cfg, seq_len))
        flops, needed = (sum(getattr(one, of) for one in everything) for of in ("flops", "needed"))
        cells = [f"{seq_len:,}", f"{flops / 1e9:,.0f}, {needed / flops:.0%}"]
        for gpu in GPUS:
            for found in (*by_part.values(), everything):
                cells.append(" to ".join(f"{1e3 * s:.2g}" for s in seconds(found, gpu)))
            best, _ = seconds(beside, gpu)
            low, high = seconds(everything, gpu)
            cells += [f"{1e3 * best:.2g}", f"{best / high:.2f} to {best / low:.2f}"]
        yield f"| {' | '.join(cells)} |"


def main(words: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--length", type=int, nargs="+", default=LENGTHS)
    print(*rows(parser.parse_args(words).length), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
