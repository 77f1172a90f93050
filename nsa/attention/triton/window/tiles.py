"""How the window's kernels are cut. No torch, no triton.

Tiles of queries hold rows as everywhere (`tiles`), and walk over the keys from the first that their
first token sees to their last token. Tiles of keys walk over the rows of the tokens that see them.
Both begin exactly there, not at a multiple of the tile, and only the tiles at both ends of a walk
have to look which key a row sees.
"""

from __future__ import annotations

from dataclasses import dataclass

from nsa.attention.triton.tiles import Tile, padded
from nsa.config import NSAConfig

# Programs of keys that a GPU should find, two for each multiprocessor of the largest, and tiles
# that each of them walks over at least: what it writes is read again.
_PROGRAMS, _LEAST_TILES = 256, 4


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
    pieces = min(-(-_PROGRAMS // programs), tiles // _LEAST_TILES)
    return WindowCut(
        forward=Tile(rows=64 if wide else 128, warps=4 if wide else 8, stages=2),
        query_gradient=Tile(rows=64, warps=8 if wide else 4, stages=2),
        key_gradient=Tile(rows=rows, warps=8 if wide else 4, stages=2),
        keys=keys,
        pieces=max(1, pieces),
    )
