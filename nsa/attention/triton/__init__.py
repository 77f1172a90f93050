"""Attention by Triton kernels: which shapes and devices they take, how their work is cut.

Imports no triton, and none of the modules here that do, before somebody asks for them. What torch
sees is in `operators`, what every launch needs in `launch`, what every kernel does in `rows`. A
branch has a file or a folder, `core` the kernels that serve several, and what launches them all.

Tiles of queries hold rows as in `rows`. Those of the window walk over the keys from the first that
their first token sees to their last token, tiles of keys over the rows of the tokens that see them.
Both begin exactly there, not at a multiple of the tile, and only the tiles at both ends of a walk
have to look which key a row sees.

Queries of the selected branch come to their blocks in one of two forms. In a walk a tile of rows,
neighboring tokens of a kv group, reads every block before its last token: those that a token did
not choose are read in vain. By block nothing is read in vain, but what every block gives a row is
stored and read again. `choose_selected_cut` takes the cheaper form, by `cost_of_walk` and
`cost_by_block`: the walk for short sequences.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


# With so many rows, a block is multiplied for as long as it takes to load it from the second-level
# cache: about 50 on an A100, 110 on an H200, by what is published of them. Assumed, not measured.
_BALANCED = 80
# FLOP of tensor cores while memory moves a byte: 153 on an A100, 206 on an H200, by data sheets.
_FLOP_OF_A_BYTE = 180
# What runs of positions are whole multiples of.
_RUN = 64
# Readers of a block that one program takes: of a run, where a program that has more is what all
# others wait for, and at least of the whole sequence, whose partial sums are stored.
_PIECE_OF_RUN, _PIECES_FROM = 128, 256
# Programs that a GPU should find in the gradients of keys, and what partial sums may take; so may
# the parts of outputs and of gradients of queries.
_PROGRAMS, _PARTS_BYTES = 1024, 256 << 20


@dataclass(frozen=True, kw_only=True)
class ByBlock:
    """How the form is cut in which blocks own the work: runs of `tokens` positions at a time.

    places: parts that a row has room for. piece: readers of a block that one program takes, of
    n_blocks blocks. merge: of the kernels that put parts together.
    """

    forward: Tile
    query_gradient: Tile
    merge: Tile
    tokens: int
    places: int
    piece: int
    n_blocks: int

    @property
    def n_pieces(self) -> int:
        """The most pieces of a run."""
        return most_pieces(self.n_blocks, self.tokens * self.places, self.piece)


@dataclass(frozen=True, kw_only=True)
class SelectedCut:
    """How one call is cut.

    piece: readers of a block that one program adds up to the gradients of its keys, of all readers
    of n_blocks blocks. by_block: None where queries walk.
    """

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile
    piece: int
    n_blocks: int
    readers: int
    by_block: ByBlock | None

    @property
    def places(self) -> int:
        """Parts that a row has room for; where queries walk, none is asked for."""
        return self.by_block.places if self.by_block else 1

    @property
    def n_pieces(self) -> int:
        """The most pieces of all blocks."""
        return most_pieces(self.n_blocks, self.readers, self.piece)


def cost_of_walk(cfg: NSAConfig, seq_len: int, rows: int) -> float:
    """Time for each row by tiles of `rows` rows, in blocks that it is multiplied by.

    A mean over the positions of a sequence, each of which comes with all blocks before it.
    """
    visible = (seq_len / cfg.l_sel + 1) / 2
    return visible * max(1.0, _BALANCED / rows)


def cost_by_block(cfg: NSAConfig, seq_len: int) -> float:
    """Time for each row where blocks own the work, in blocks that it is multiplied by.

    A row's part is written beside its product with the block, and read where there is no product.
    """
    product = 2 * padded(cfg.l_sel) * (padded(cfg.d_k) + padded(cfg.d_v))
    part = _FLOP_OF_A_BYTE * (2 * padded(cfg.d_v) + 4) / product
    return min(cfg.n_sel, cfg.n_blocks(seq_len)) * (max(1.0, part) + part)


def cut_by_block(cfg: NSAConfig, seq_len: int, pairs: int) -> ByBlock:
    """Equal runs, as few as leave their parts in what queries and output of the call take.

    Or in _PARTS_BYTES, where that is more: each run is four launches that wait for each other.
    """
    # With one place alone nothing would say whether it is taken.
    places = max(2, min(cfg.n_sel, cfg.n_blocks(seq_len)))
    # A log-sum-exp is as large as two numbers of a type of two bytes.
    rows, of_row = pairs * cfg.heads_per_group, 2 * places * (max(cfg.d_k, cfg.d_v) + 2)
    room = max(seq_len * rows * 2 * (cfg.d_k + cfg.d_v), _PARTS_BYTES)
    tokens = max(1, room // (rows * of_row) // _RUN) * _RUN
    tokens = -(-seq_len // (-(-seq_len // tokens) * _RUN)) * _RUN
    wide = max(padded(cfg.d_k), padded(cfg.d_v)) > 64
    return ByBlock(
        # One stage was the fastest on an H200.
        forward=Tile(rows=128, warps=8, stages=2) if wide else Tile(rows=64, warps=4, stages=1),
        # With more rows where heads are wide, it would not fit the 99 KiB of capability 8.6.
        query_gradient=Tile(rows=64, warps=8 if wide else 4, stages=2),
        merge=Tile(rows=32, warps=4, stages=2),
        tokens=tokens,
        places=places,
        piece=_PIECE_OF_RUN,
        n_blocks=cfg.n_blocks(seq_len),
    )


def _piece(cfg: NSAConfig, seq_len: int, pairs: int) -> int:
    """Readers of a block that one program adds up: few, while partial sums are few enough too.

    They take no more than queries and output do, as long as there are programs enough. Where they
    exceed that there are as many pieces as blocks, or less, beside the last ones.
    """
    n_bytes = padded(cfg.l_sel) * (padded(cfg.d_k) + padded(cfg.d_v)) * 4 * pairs
    beside = pairs * seq_len * cfg.heads_per_group * (cfg.d_k + cfg.d_v) * 2
    n_blocks, readers, piece = cfg.n_blocks(seq_len), _readers(cfg, seq_len), _PIECES_FROM
    most = max(min(beside, _PARTS_BYTES) // n_bytes, 2 * n_blocks)
    while (
        most_pieces(n_blocks, readers, piece) > most
        and most_pieces(n_blocks, readers, 2 * piece) * pairs >= _PROGRAMS
    ):
        piece *= 2
    return piece


def _readers(cfg: NSAConfig, seq_len: int) -> int:
    """The most readers that all blocks have together."""
    return seq_len * min(cfg.n_sel, cfg.n_blocks(seq_len))


def most_pieces(n_blocks: int, readers: int, piece: int) -> int:
    """The most pieces that the lists of blocks can be cut into; known without the lists."""
    return n_blocks + readers // piece


def choose_selected_cut(cfg: NSAConfig, seq_len: int, pairs: int) -> SelectedCut:
    """How a call of `pairs` = batch x kv groups is cut."""
    wide = max(padded(cfg.d_k), padded(cfg.d_v)) > 64
    # Found with the assembler (benchmarks/triton_aot): with more rows, registers spill.
    rows = 64 if wide else 128
    walks = cost_of_walk(cfg, seq_len, rows) <= cost_by_block(cfg, seq_len)
    return SelectedCut(
        # Fastest on an H200; with 128 rows one program fits its multiprocessors, here three do.
        forward=Tile(rows=64, warps=8 if wide else 4, stages=2),
        query_gradient=Tile(rows=rows, warps=8, stages=2),
        key_gradient=Tile(rows=32, warps=8, stages=2),
        piece=_piece(cfg, seq_len, pairs),
        n_blocks=cfg.n_blocks(seq_len),
        readers=_readers(cfg, seq_len),
        by_block=None if walks else cut_by_block(cfg, seq_len, pairs),
    )


# What is assumed of each branch, for a config, a length and pairs = batch x kv groups.
CHOOSERS: dict[str, Callable[[NSAConfig, int, int], Any]] = {
    "selected": choose_selected_cut,
    "compressed": choose_compressed_cut,
    "top": choose_compressed_cut,
    "window": choose_window_cut,
}
