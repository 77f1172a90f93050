"""How the work of the compressed branch's kernels is cut. No torch, no triton."""

from __future__ import annotations

from dataclasses import dataclass

from nsa.attention.triton.tiles import LEAST, Tile, padded
from nsa.config import NSAConfig

# Programs that a GPU should find in the gradients of keys, and the fewest tokens of a piece.
_PROGRAMS, _FEWEST_TOKENS = 512, 64
# Numbers of a type that add up to one of float32, whose 24 bits it holds by 8, 11 or all. Two of
# float16 are off by 2^-25 at most where the number is below 1.
TERMS = {"bfloat16": 3, "float16": 2, "float32": 1}
# Keys of a program that sums up pieces.
FEW = LEAST


@dataclass(frozen=True, kw_only=True)
class CompressedCut:
    """How one call is cut. top: its rows are tokens.

    keys, rounded_keys: of a step of the forward pass, which reads them in float32, and of the
    gradient of queries, which reads them rounded. owned: keys of a program that adds up their
    gradients, over `piece` tokens. blocks: selection blocks that are scored at once.
    """

    forward: Tile
    query_gradient: Tile
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


def places(cfg: NSAConfig) -> int:
    """Blocks that are kept sorted: a power of two that holds n_sel."""
    return padded(cfg.n_sel)


def choose_compressed_cut(cfg: NSAConfig, seq_len: int, pairs: int) -> CompressedCut:
    """How a call of `pairs` = batch x kv groups is cut."""
    wide = max(padded(cfg.d_k), padded(cfg.d_v)) > 64
    # Found with the assembler (benchmarks/triton_aot.py): with more keys in float32, or rows,
    # registers spill, because tensor cores before Hopper's take such a tile of keys from them.
    keys, owned = 32, 64
    tiles = max(1, -(-cfg.n_compressed(seq_len) // owned)) * pairs
    piece = _FEWEST_TOKENS
    while tiles * -(-seq_len // piece) > _PROGRAMS and piece < seq_len:
        piece *= 2
    return CompressedCut(
        forward=Tile(rows=32, warps=4, stages=2) if wide else Tile(rows=128, warps=8, stages=2),
        query_gradient=Tile(rows=64 if wide else 128, warps=8, stages=2),
        key_gradient=Tile(rows=64, warps=8 if wide else 4, stages=2),
        top=Tile(rows=64, warps=8, stages=1 if wide else 2),
        keys=keys,
        rounded_keys=64,
        owned=owned,
        piece=piece,
        blocks=max(16 if wide else 32, places(cfg)),
    )
