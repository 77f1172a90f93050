"""Which shapes and devices the Triton kernels take, and how their work is cut. Imports no triton.

Tiles of queries hold rows as in `rows`. Those of the window walk over the keys from the first that
their first token sees to their last token, tiles of keys over the rows of the tokens that see them.
Both begin exactly there, not at a multiple of the tile, and only the tiles at both ends of a walk
have to look which key a row sees. `selected_tiles` has the cuts of the selected branch.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.config import NSAConfig

# The least that tensor cores multiply at once.
LEAST = 16
WIDEST_HEAD, WIDEST_BLOCK, MOST_HEADS, MOST_BLOCKS = 128, 128, 16, 4096
# The best blocks so far are kept sorted in registers.
MOST_SELECTED = 64


def padded(size: int) -> int:
    """The power of two that holds `size`, of at least `LEAST`."""
    return max(LEAST, 1 << (size - 1).bit_length())


def words_of_bits(seq_len: int, l_sel: int) -> int:
    """Words of 32 bits, one bit for each block of l_sel tokens: bit b of word w is of 32*w + b."""
    return -(-seq_len // (32 * l_sel))


def room_for_bits(of_tokens: Tensor, l_sel: int) -> Tensor:
    """For int32 [B*G, words, S], of [B,S,G,...]: which blocks of l_sel tokens each token reads."""
    batch, seq_len, groups = of_tokens.shape[:3]
    shape = (batch * groups, words_of_bits(seq_len, l_sel), seq_len)
    return of_tokens.new_empty(shape, dtype=torch.int32)


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


_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_CAPABILITY = (8, 0)
# Triton's own: its kernels then run in Python, on any device, for tests.
_INTERPRETED = "TRITON_INTERPRET"


def triton_problem(
    cfg: NSAConfig, dtype: torch.dtype, device: torch.device, seq_len: int | None = None
) -> str | None:
    """Why the kernels cannot run for this shape, type and device; None where they can."""
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)
        if found < _CAPABILITY:
            return f"Triton needs compute capability 8.0, this is {found[0]}.{found[1]}"
    elif os.environ.get(_INTERPRETED) != "1":
        return f"Triton needs a CUDA device, this is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if dtype not in _TYPES:
        return f"the Triton kernels have no {str(dtype).removeprefix('torch.')}"
    return shape_problem(cfg, seq_len)


# Programs of keys that a GPU should find, two for each multiprocessor of the largest, and tiles
# that each of them walks over at least: what it writes is read again.
_WINDOW_PROGRAMS, _LEAST_TILES = 256, 4


@dataclass(frozen=True, kw_only=True)
class WindowCut:
    """How one call is cut. keys: what a tile of queries, or a program of keys, takes at once.

    pieces: programs that share the walk of a tile of keys.
    """

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile
    keys: int
    pieces: int


def choose_window_cut(cfg: NSAConfig, seq_len: int, pairs: int) -> WindowCut:
    """How a call of `pairs` = batch x kv groups is cut.

    Tiles were found with the assembler (benchmarks/triton_aot): nothing spills on any
    capability. Pieces take part of what would be the time of one walk where programs are few, and
    fetch nothing twice, as tiles of fewer keys would.
    """
    wide = max(padded(cfg.d_k), padded(cfg.d_v)) > 64
    rows, keys = 64, 64
    programs = -(-seq_len // keys) * pairs
    tiles = min(keys + cfg.w - 1, seq_len) * cfg.heads_per_group // rows
    pieces = min(-(-_WINDOW_PROGRAMS // programs), tiles // _LEAST_TILES)
    return WindowCut(
        # With more, pooled keys beside it take registers that a second program needs on Hopper.
        forward=Tile(rows=64, warps=4, stages=2),
        query_gradient=Tile(rows=64, warps=8 if wide else 4, stages=2),
        key_gradient=Tile(rows=rows, warps=8 if wide else 4, stages=2),
        keys=keys,
        pieces=max(1, pieces),
    )


# Programs that a GPU should find in the gradients of keys, and the fewest tokens of a piece.
_COMPRESSED_PROGRAMS, _FEWEST_TOKENS = 1024, 64
# From so many compressed keys on, a program adds up the gradients of twice as many.
_LONG = 1024
# Numbers of a type that add up to one of float32, whose 24 bits it holds by 8, 11 or all. Two of
# float16 are off by 2^-25 at most where the number is below 1.
TERMS = {"bfloat16": 3, "float16": 2, "float32": 1}


@dataclass(frozen=True, kw_only=True)
class CompressedCut:
    """How one call is cut. top: its rows are tokens.

    keys, rounded_keys: of a step of the forward pass, which reads all terms of them, and of the
    gradient of queries, which reads them rounded. owned: keys of a program that adds up their
    gradients, over `piece` tokens. blocks: selection blocks that are scored at once, a power of
    two: with `steps` keys each, 16 keys or more.
    """

    forward: Tile
    key_gradient: Tile
    top: Tile
    keys: int
    rounded_keys: int
    owned: int
    piece: int
    blocks: int

    def n_tiles(self, n_keys: int) -> int:
        """Tiles of compressed keys whose gradients are added up."""
        return -(-n_keys // self.owned)

    def n_pieces(self, seq_len: int) -> int:
        """Pieces of tokens."""
        return -(-seq_len // self.piece)


def steps_of(l_sel: int, stride: int) -> int:
    """Room for the compressed keys that begin in a selection block: a power of two."""
    return 1 << (l_sel // stride - 1).bit_length()


def choose_compressed_cut(cfg: NSAConfig, seq_len: int, pairs: int) -> CompressedCut:
    """How a call of `pairs` = batch x kv groups is cut."""
    wide = max(padded(cfg.d_k), padded(cfg.d_v)) > 64
    # Found with the assembler (benchmarks/triton_aot): spills nothing on any capability.
    keys = 32
    # Each tile of keys reads all rows that see them: long sequences have enough tiles of many keys.
    owned = 128 if not wide and cfg.n_compressed(seq_len) >= _LONG else 64
    tiles = max(1, -(-cfg.n_compressed(seq_len) // owned)) * pairs
    piece = _FEWEST_TOKENS
    while tiles * -(-seq_len // piece) > _COMPRESSED_PROGRAMS and piece < seq_len:
        piece *= 2
    return CompressedCut(
        forward=Tile(rows=128, warps=8, stages=2),
        key_gradient=Tile(rows=64, warps=8 if wide or owned > 64 else 4, stages=2),
        top=Tile(rows=64, warps=4, stages=2),
        keys=keys,
        rounded_keys=64,
        owned=owned,
        piece=piece,
        blocks=max(1, (32 if wide else 64) // steps_of(cfg.l_sel, cfg.d)),
    )
