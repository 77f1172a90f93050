"""Which shapes the Triton kernels take, and what a tile of them is. No torch, no triton."""

from __future__ import annotations

from dataclasses import dataclass

from nsa.config import NSAConfig

# The least that tensor cores multiply at once.
LEAST = 16
WIDEST_HEAD, WIDEST_BLOCK, MOST_HEADS, MOST_BLOCKS = 128, 128, 16, 4096
# The best blocks so far are kept sorted in registers.
MOST_SELECTED = 64


def padded(size: int) -> int:
    """The power of two that holds `size`, of at least `LEAST`."""
    return max(LEAST, 1 << (size - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How a kernel is compiled: rows of a program, warps, stages of its pipeline."""

    rows: int
    warps: int
    stages: int


def register_limit(major: int) -> int | None:
    """What the assembler is told to give a thread on a compute capability; None: as it likes.

    For Blackwell it squeezes some kernels into 128 registers and spills a few bytes (seen with
    benchmarks/triton_aot); told that it may take all, it spills nothing.
    """
    return 255 if major >= 10 else None


def shape_problem(cfg: NSAConfig, seq_len: int | None = None) -> str | None:
    """Why the kernels do not take this shape; None where they do."""
    widest = max(cfg.d_k, cfg.d_v)
    if widest > WIDEST_HEAD:
        return f"heads of width {widest}: the kernels take up to {WIDEST_HEAD}"
    if cfg.heads_per_group > MOST_HEADS:
        return f"{cfg.heads_per_group} heads in a group: the kernels take up to {MOST_HEADS}"
    if cfg.l_sel > WIDEST_BLOCK:
        return f"l_sel={cfg.l_sel}: the kernels take up to {WIDEST_BLOCK}"
    if cfg.n_sel > MOST_SELECTED:
        return f"n_sel={cfg.n_sel}: the kernels take up to {MOST_SELECTED}"
    if seq_len is not None and cfg.n_blocks(seq_len) > MOST_BLOCKS:
        return f"S={seq_len} is {cfg.n_blocks(seq_len)} blocks: the kernels take {MOST_BLOCKS}"
    return None
