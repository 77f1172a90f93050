"""How the work of the selected branch's kernels is cut. No torch, no triton.

Queries of the selected branch come to their blocks in one of two forms. In a walk a tile of rows,
neighboring tokens of a kv group, reads every block before its last token: those that a token did
not choose are read in vain. By block nothing is read in vain, but what every block gives a row is
stored and read again. `choose_cut` takes the cheaper form, by `cost_of_walk` and `cost_by_block`:
the walk for short sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from nsa.attention.triton.tiles import Tile, padded
from nsa.config import NSAConfig

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
class Cut:
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


def choose_cut(cfg: NSAConfig, seq_len: int, pairs: int) -> Cut:
    """How a call of `pairs` = batch x kv groups is cut."""
    wide = max(padded(cfg.d_k), padded(cfg.d_v)) > 64
    # Found with the assembler (benchmarks/triton_aot): with more rows, registers spill.
    rows = 64 if wide else 128
    walks = cost_of_walk(cfg, seq_len, rows) <= cost_by_block(cfg, seq_len)
    return Cut(
        # Fastest on an H200; with 128 rows one program fits its multiprocessors, here three do.
        forward=Tile(rows=64, warps=8 if wide else 4, stages=2),
        query_gradient=Tile(rows=rows, warps=8, stages=2),
        key_gradient=Tile(rows=32, warps=8, stages=2),
        piece=_piece(cfg, seq_len, pairs),
        n_blocks=cfg.n_blocks(seq_len),
        readers=_readers(cfg, seq_len),
        by_block=None if walks else cut_by_block(cfg, seq_len, pairs),
    )
