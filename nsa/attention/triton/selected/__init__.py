"""Starts the selected branch's kernels, and those that list each block's readers.

Never asks the device for a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from nsa.attention.triton import ByBlock, SelectedCut, launch, padded
from nsa.attention.triton.selected.queries import (
    forward_kernel,
    gradient_merge_kernel,
    gradient_part_kernel,
    merge_kernel,
    part_kernel,
)
from nsa.attention.triton.selected.readers import list_kernel, piece_kernel, place_kernel
from nsa.config import NSAConfig


def forward_mixed(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, cmp: Tensor, win: Tensor, gates: Tensor,
    cfg: NSAConfig,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gated sum [B,S,H,Dv] of all branches; this one's output [B,S,G,h,Dv] and log-sum-exp.

    cmp, win: the other branches [B,S,G,h,Dv], contiguous; gates [B,S,H,3]. The log-sum-exp is to
    the base 2 [B*G, S*h].
    """
    batch, seq_len, groups, heads = q.shape[:4]
    cut: SelectedCut = launch.cut_of("selected", q, cfg)
    q, k, v, gates = (launch.inner(x) for x in (q, k, v, gates))
    out, lse = launch.results_of(q, cfg, q.dtype)
    mixed = torch.empty(*gates.shape[:3], cfg.d_v, dtype=gates.dtype, device=q.device)
    given, into = (q, k, v), (out, lse, cmp, win, gates, mixed)
    with launch.device_of(q):
        if cut.by_block:
            _forward_by_block(given, lists_of(bits, cfg, cut), into, cfg, cut.by_block)
        else:
            tile = cut.forward
            forward_kernel[triton.cdiv(seq_len * heads, tile.rows), batch * groups](
                *given, bits, *into, seq_len, groups, bits.shape[1], launch.scale_of(cfg),
                *launch.strides_of(*given), *gates.stride()[:3], **shape_constants(cfg),
                **launch.how(tile),
            )  # fmt: skip
    return mixed, out, lse


def give_keys_of_blocks(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, lse: Tensor, delta: Tensor, lists: Lists,
    cfg: NSAConfig, cut: SelectedCut,
) -> Tensor:  # fmt: skip
    """Start the kernel that owns blocks; parts [B*G, pieces, keys, widths].

    They are padded to tiles, not to what is inside: that much is written.
    """
    seq_len, groups = q.shape[1:3]
    pairs = q.shape[0] * groups
    parts_shape = (pairs, cut.n_pieces, padded(cfg.l_sel), padded(cfg.d_k) + padded(cfg.d_v))
    parts = torch.empty(parts_shape, dtype=torch.float32, device=q.device)
    piece_kernel[cut.n_pieces, pairs](
        q, k, v, grad, lse, delta, lists.readers, lists.counts, lists.offsets, lists.ends, parts,
        seq_len, groups, cfg.n_blocks(seq_len), cut.n_pieces, lists.length, launch.scale_of(cfg),
        *launch.strides_of(q, k, v), **shape_constants(cfg), **piece_constants(cut),
        **launch.how(cut.key_gradient),
    )  # fmt: skip
    return parts


def _forward_by_block(
    given: tuple[Tensor, ...], lists: Lists, into: tuple[Tensor, ...], cfg: NSAConfig, cut: ByBlock
) -> None:
    """Fill output, log-sum-exp and gated sum, a run of positions after the other.

    given: q, k, v. into: output and log-sum-exp, the other branches, gates, the gated sum.
    """
    (q, k, v), gates = given, into[4]
    batch, seq_len, groups, heads = q.shape[:4]
    pairs, tokens, shape = batch * groups, lists.tokens, shape_constants(cfg)
    room = (pairs * tokens * cut.places * heads,)
    parts = torch.empty((*room, cfg.d_v), dtype=q.dtype, device=q.device)
    sums = torch.empty(room, dtype=torch.float32, device=q.device)
    merged = {name: shape[name] for name in ("HEADS", "D_V")}
    for begin, end in lists.runs():
        part_kernel[cut.n_pieces, pairs](
            q, k, v, parts, sums, lists.readers, lists.counts, lists.offsets, lists.ends, begin,
            tokens, seq_len, groups, cfg.n_blocks(seq_len), lists.length, launch.scale_of(cfg),
            *launch.strides_of(q, k, v), **shape, **piece_constants(cut),
            **launch.how(cut.forward),
        )  # fmt: skip
        merge_kernel[triton.cdiv((end - begin) * heads, cut.merge.rows), pairs](
            parts, sums, lists.read, *into, begin, tokens, seq_len, groups, *gates.stride()[:3],
            **merged, PLACES=cut.places, **launch.how(cut.merge),
        )  # fmt: skip


def give_queries_by_block(
    q: Tensor, k: Tensor, v: Tensor, lists: Lists, lse: Tensor, grad: Tensor, dq: Tensor,
    delta: Tensor, cfg: NSAConfig, cut: ByBlock,
) -> None:  # fmt: skip
    """Fill the gradient of the queries, a run of positions after the other."""
    batch, seq_len, groups, heads = q.shape[:4]
    pairs, tokens, shape = batch * groups, lists.tokens, shape_constants(cfg)
    room = (pairs * tokens * cut.places * heads, cfg.d_k)
    parts = torch.empty(room, dtype=q.dtype, device=q.device)
    merged = {name: shape[name] for name in ("HEADS", "D_K")}
    for begin, end in lists.runs():
        gradient_part_kernel[cut.n_pieces, pairs](
            q, k, v, grad, lse, delta, parts, lists.readers, lists.counts, lists.offsets,
            lists.ends, begin, tokens, seq_len, groups, cfg.n_blocks(seq_len), lists.length,
            launch.scale_of(cfg), cfg.d_k**-0.5, *launch.strides_of(q, k, v), **shape,
            **piece_constants(cut), **launch.how(cut.query_gradient),
        )  # fmt: skip
        gradient_merge_kernel[triton.cdiv((end - begin) * heads, cut.merge.rows), pairs](
            parts, lists.read, dq, begin, tokens, seq_len, groups, **merged, PLACES=cut.places,
            **launch.how(cut.merge),
        )  # fmt: skip


def piece_constants(cut: ByBlock | SelectedCut) -> dict[str, int]:
    """What kernels are compiled for that take pieces of lists, of a run or the whole sequence."""
    blocks: int = triton.next_power_of_2(cut.n_blocks)
    return {"PLACES": cut.places, "PIECE": cut.piece, "BLOCKS": blocks}


def shape_constants(cfg: NSAConfig) -> dict[str, int]:
    """What kernels are compiled for: the shape."""
    return launch.head_constants(cfg) | {"L_SEL": cfg.l_sel}


def list_constants(cfg: NSAConfig, cut: SelectedCut) -> dict[str, int]:
    """What the kernel of lists is compiled for."""
    of_run = cut.by_block.piece if cut.by_block else cut.piece
    shape = {"L_SEL": cfg.l_sel, "TOKENS": TOKENS_OF_A_LIST, "PIECE_OF_RUN": of_run}
    return shape | piece_constants(cut)


# Positions that one program of `place_kernel` and of `list_kernel` takes at a time.
TOKENS_OF_PLACES, TOKENS_OF_A_LIST = 256, 1024


@dataclass(frozen=True, kw_only=True)
class Lists:
    """Queries that read each block: readers [B*G, S*n], and how they are cut (`readers`).

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


def lists_of(bits: Tensor, cfg: NSAConfig, cut: SelectedCut) -> Lists:
    """Of a call that is cut so; where queries walk, of one run.

    The backward pass makes them again: that takes these launches, and reads the bits three times,
    4/l_sel bytes of each pair of query and key it could see against heads * d_k products of dense
    attention. Kept, they would be 4*n_sel bytes of a token and kv group, with 6 heads 64 wide a
    twelfth of what the queries are, in every layer until its turn comes.
    """
    pairs, words, seq_len = bits.shape
    n_blocks = cfg.n_blocks(seq_len)
    places = cut.places
    tokens = min(cut.by_block.tokens, seq_len) if cut.by_block else seq_len
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
    for fill in (False, True):
        list_kernel[n_blocks, pairs, runs](
            bits, before, counts, offsets, ends, readers, *numbers, FILL=fill,
            **list_constants(cfg, cut),
        )  # fmt: skip
    return Lists(tokens=tokens, places=places, readers=readers, counts=counts, offsets=offsets,
                 ends=ends, read=read)  # fmt: skip
