"""How the work of the compressed branch's kernels is cut. No torch, no triton."""

from __future__ import annotations

from dataclasses import dataclass

from nsa.attention.triton.tiles import LEAST, Tile, padded
from nsa.config import NSAConfig

# Programs that a GPU should find in the gradients of keys, and the fewest tokens of a piece.
_PROGRAMS, _FEWEST_TOKENS = 1024, 64
# From so many compressed keys on, a program adds up the gradients of twice as many.
_LONG = 1024
# Numbers of a type that add up to one of float32, whose 24 bits it holds by 8, 11 or all. Two of
# float16 are off by 2^-25 at most where the number is below 1.
TERMS = {"bfloat16": 3, "float16": 2, "float32": 1}
# Keys of a program that sums up pieces, or makes terms.
FEW = LEAST


@dataclass(frozen=True, kw_only=True)
class CompressedCut:
    """How one call is cut. top: its rows are tokens.

    keys, rounded_keys: of a step of the forward pass, which reads all terms of them, and of the
    gradient of queries, which reads them rounded. owned: keys of a program that adds up their
    gradients, over `piece` tokens. blocks: selection blocks that are scored at once, a power of
    two: with `steps` keys each, 16 keys or more.
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


def steps(cfg: NSAConfig) -> int:
    """Room for the compressed keys that begin in a selection block: a power of two."""
    return 1 << (cfg.l_sel // cfg.d - 1).bit_length()


def reach_of(cfg: NSAConfig) -> int:
    """Later selection blocks that a compressed key reaches into, at most."""
    step = cfg.l_sel // cfg.d
    return (step - 1 + cfg.l // cfg.d - 1) // step


def choose_compressed_cut(cfg: NSAConfig, seq_len: int, pairs: int) -> CompressedCut:
    """How a call of `pairs` = batch x kv groups is cut."""
    wide = max(padded(cfg.d_k), padded(cfg.d_v)) > 64
    # Found with the assembler (benchmarks/triton_aot): spills nothing on any capability.
    keys = 32
    # Each tile of keys reads all rows that see them: long sequences have enough tiles of many keys.
    owned = 128 if not wide and cfg.n_compressed(seq_len) >= _LONG else 64
    tiles = max(1, -(-cfg.n_compressed(seq_len) // owned)) * pairs
    piece = _FEWEST_TOKENS
    while tiles * -(-seq_len // piece) > _PROGRAMS and piece < seq_len:
        piece *= 2
    return CompressedCut(
        forward=Tile(rows=32, warps=4, stages=2) if wide else Tile(rows=128, warps=8, stages=2),
        query_gradient=Tile(rows=64 if wide else 128, warps=8, stages=2),
        key_gradient=Tile(rows=64, warps=8 if wide or owned > 64 else 4, stages=2),
        top=Tile(rows=64, warps=4, stages=2),
        keys=keys,
        rounded_keys=64,
        owned=owned,
        piece=piece,
        blocks=max(1, (32 if wide else 64) // steps(cfg)),
    )
