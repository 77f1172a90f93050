"""Makes the lists of each block's readers: four launches for a call, whatever its runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from nsa.attention.triton.selected.index import list_kernel, offset_kernel, place_kernel
from nsa.attention.triton.selected.tiles import Cut
from nsa.config import NSAConfig

# Positions that one program of `place_kernel` and of `list_kernel` takes at a time, and blocks that
# one of `offset_kernel` does.
TOKENS_OF_PLACES, TOKENS_OF_A_LIST, BLOCKS_AT_ONCE = 256, 1024, 1024


@dataclass(frozen=True, kw_only=True)
class Lists:
    """Queries that read each block: readers [B*G, S*n], and how they are cut (`index`).

    Of list 0, the whole sequence, and of 1 + r, run r of `tokens` positions, [1 + runs, B*G, NB]:
    counts, offsets, and of pieces the ends. read [B*G, S]: blocks of each query, where it has
    `places`, more than one.
    """

    tokens: int
    places: int
    readers: Tensor
    counts: Tensor
    offsets: Tensor
    ends: Tensor
    read: Tensor

    @property
    def length(self) -> int:
        """Room for readers of all blocks of a pair."""
        return self.readers.shape[1]

    def runs(self) -> Iterator[tuple[int, int]]:
        """From where to where each run of positions goes."""
        seq_len = self.read.shape[-1]
        for begin in range(0, seq_len, self.tokens):
            yield begin, min(begin + self.tokens, seq_len)


def lists_of(bits: Tensor, cfg: NSAConfig, cut: Cut) -> Lists:
    """Of a call that is cut so; where queries walk, of one run.

    The backward pass makes them again: that takes these launches, and reads the bits three times,
    4/l_sel bytes of each pair of query and key it could see against heads * d_k products of dense
    attention. Kept, they would be 4*n_sel bytes of a token and kv group, with 6 heads 64 wide a
    twelfth of what the queries are, in every layer until its turn comes.
    """
    pairs, words, seq_len = bits.shape
    n_blocks = cfg.n_blocks(seq_len)
    tokens, places, piece_of_run = seq_len, 1, cut.piece
    if cut.by_block:
        tokens, places = min(cut.by_block.tokens, seq_len), cut.by_block.places
        piece_of_run = cut.by_block.piece
    runs = triton.cdiv(seq_len, tokens)

    def whole(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=bits.device)

    readers = whole(pairs, seq_len * min(cfg.n_sel, n_blocks))
    counts, offsets, ends = (whole(1 + runs, pairs, n_blocks) for _ in range(3))
    # Where queries walk nobody asks for places.
    before, read = bits, bits
    if places > 1:
        before, read = whole(pairs, words, seq_len, dtype=torch.int8), whole(pairs, seq_len)
        place_kernel[triton.cdiv(seq_len, TOKENS_OF_PLACES), pairs](
            bits, before, read, seq_len, words, TOKENS=TOKENS_OF_PLACES
        )
    numbers = (tokens, seq_len, words, n_blocks, readers.shape[1])
    more = {"L_SEL": cfg.l_sel, "TOKENS": TOKENS_OF_A_LIST, "PLACES": places}
    for fill in (False, True):
        list_kernel[n_blocks, pairs, runs](
            bits, before, counts, offsets, readers, *numbers, FILL=fill, **more
        )
        if not fill:
            offset_kernel[1 + runs, pairs](
                counts, offsets, ends, runs, n_blocks, PIECE=cut.piece,
                PIECE_OF_RUN=piece_of_run, BLOCKS=BLOCKS_AT_ONCE,
            )  # fmt: skip
    return Lists(tokens=tokens, places=places, readers=readers, counts=counts, offsets=offsets,
                 ends=ends, read=read)  # fmt: skip
