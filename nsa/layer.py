"""The attention layer: one product, rotary positions, compression and gates around the core.

One matrix product makes queries, keys, values and gates; its result is cut apart, and queries and
keys are turned by their positions, all in few and large operators, for a device that waits for its
host. Rotary positions: neighboring components of a vector turn together as one complex number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from nsa.attention import attend
from nsa.attention.branches import Branches, part_shape, split_dim
from nsa.attention.selection import accumulate_dtype, group_queries
from nsa.config import (
    BATCHED,
    FORCED_INITIAL_BLOCKS,
    FORCED_LOCAL_BLOCKS,
    ROPE_BASE,
    NSAConfig,
    Way,
)
from nsa.contract import GATES_COLUMNS, NSAError, names

# Column order of the product.
PARTS = ("q", "k_cmp", "k_sel", "k_win", "v_cmp", "v_sel", "v_win", "gates")
# Layers that can be replayed instead of run (`nsa.step.cuda_graphs`): the output of the last layer
# for the first one's x [B,S,dim], or None where this pass may not be replayed.
Recorded = Callable[[Tensor], Tensor | None]


def columns(cfg: NSAConfig) -> dict[str, slice]:
    """Where each part lies among the columns of the product, heads side by side."""
    widths = [math.prod(part_shape(part, cfg)) for part in PARTS]
    return {p: slice(e - w, e) for p, e, w in zip(PARTS, accumulate(widths), widths, strict=True)}


def n_columns(cfg: NSAConfig) -> int:
    """Those of all parts."""
    return sum(math.prod(part_shape(part, cfg)) for part in PARTS)


def rotations(positions: Tensor, d: int, base: float, dtype: torch.dtype) -> Tensor:
    """Unit complex numbers [S, d/2] that turn a vector of even width d at each position.

    `dtype` is the real type of the vectors (half types use complex64). Angles are computed in
    float64, so that far positions stay exact.
    """
    frequency = base ** (-torch.arange(0, d, 2, dtype=torch.float64, device=positions.device) / d)
    angle = positions.to(torch.float64)[:, None] * frequency
    kind = torch.complex128 if dtype == torch.float64 else torch.complex64
    return torch.polar(torch.ones_like(angle), angle).to(kind)


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(split_dim(x, x.dim() - 1, 2))


def aligned(weight: Tensor) -> Tensor:
    """A weight [N, dim] with zero rows up to a multiple of 8.

    A product's rows then begin at multiples of 16 bytes in half types, without which libraries
    leave out their fastest kernels. What is stored and differentiated is the weight as it is.
    """
    return pad(weight, (0, 0, 0, -weight.shape[0] % 8)) if weight.shape[0] % 8 else weight


def split_projection(y: Tensor, gate_bias: Tensor, turns: Tensor, cfg: NSAConfig) -> Branches:
    """Cut y [B,S,n_columns] apart: keys and queries turned, gates through the sigmoid.

    Columns of y beyond `n_columns` are those of `aligned`, of no use here.

    Queries and the keys of all branches lie side by side, so that one product turns them all; two
    vectors turned like this have a product that depends on their positions only through the
    difference. turns [S, d_k/2] complex, or [S, d_k/2, 2] as real numbers, for a compiler that
    knows no others.
    """
    wide, groups = accumulate_dtype(y.dtype), [cfg.n_kv_groups] * 3
    heads = [cfg.n_heads, *groups]
    widths = [sum(heads) * cfg.d_k, sum(groups) * cfg.d_v, 3 * cfg.n_heads]
    turned, values, gates, *_ = y.split_with_sizes([*widths, y.shape[-1] - sum(widths)], -1)
    source = split_dim(turned.to(wide).contiguous(), 2, cfg.d_k)
    if turns.is_complex():
        turned = torch.view_as_real(_pairs(source) * turns[:, None]).flatten(-2).to(y.dtype)
    else:
        turned = _turn_real(source, turns).to(y.dtype)
    opened = (gates.to(wide) + gate_bias.to(wide)).sigmoid().to(y.dtype)
    # Their columns are not aligned for the kernels that load 16 bytes at a time.
    values = split_dim(values.contiguous(), 2, cfg.d_v)
    parts = (
        *turned.split_with_sizes(heads, 2),
        *values.split_with_sizes(groups, 2),
        split_dim(opened, 2, 3),
    )
    return Branches(**dict(zip(PARTS, parts, strict=True)))


def _turn_real(source: Tensor, turns: Tensor) -> Tensor:
    even, odd = split_dim(source, 3, 2).unbind(-1)
    cos, sin = turns[:, None].unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class BlockCompressor(nn.Module):
    """phi "mlp": a block of l vectors, plus its position embedding, through a small MLP."""

    def __init__(self, width: int, cfg: NSAConfig) -> None:
        super().__init__()
        self.l, self.d = cfg.l, cfg.d
        self.position = nn.Parameter(torch.randn(cfg.l, width) * 0.02)
        # No bias at the end: one vector added to every key changes no softmax, so it could not
        # learn.
        self.net = nn.Sequential(
            nn.Linear(cfg.l * width, 2 * width), nn.GELU(), nn.Linear(2 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compress x [B,S,G,D] to [B,N,G,D]; N is 0 when S < l."""
        if x.shape[1] < self.l:
            # Keeps every parameter in the graph, with a zero gradient, for unused-parameter checks.
            nothing = sum(p.sum() * 0 for p in self.parameters())
            return x[:, :0] + nothing
        # A group's blocks follow each other, as its queries do.
        blocks = x.transpose(1, 2).unfold(2, self.l, self.d).transpose(-1, -2) + self.position
        out: Tensor = self.net(blocks.flatten(-2))
        return out.transpose(1, 2)


class NSAAttention(nn.Module):
    """Native Sparse Attention layer: x [B,S,dim] to [B,S,dim].

    Each branch has its own key and value projection; queries are shared. Rotary positions turn
    queries and keys; compressed keys are made from turned keys. Gates are the sigmoid of a linear
    map of the layer's input, one per head and branch. Raises NSAError for an odd d_k.

    `way`: how the core runs, to be exchanged at any time.
    """

    def __init__(self, cfg: NSAConfig, way: Way = BATCHED) -> None:
        super().__init__()
        if cfg.d_k % 2:
            raise NSAError(f"d_k={cfg.d_k}: rotary positions need an even key width")
        self.cfg, self.way = cfg, way
        self.rope_base = ROPE_BASE
        # One product makes queries, every branch's keys and values, and gates; `columns` says
        # which rows of the weight are whose.
        self.in_proj = nn.Linear(cfg.dim, n_columns(cfg), bias=False)
        self.gate_bias = nn.Parameter(torch.zeros(cfg.n_heads * 3))
        self.out_proj = nn.Linear(cfg.n_heads * cfg.d_v, cfg.dim, bias=False)
        if cfg.phi == "mlp":
            self.compress_k = BlockCompressor(cfg.d_k, cfg)
            self.compress_v = BlockCompressor(cfg.d_v, cfg)
        self._turns: Tensor | None = None
        self.last_gates: Tensor | None = None
        self.last_blocks: Tensor | None = None

    def turns(self, seq_len: int, like: Tensor) -> Tensor:
        """Rotations of positions 0 .. seq_len - 1, kept between calls."""
        kind = torch.complex128 if like.dtype == torch.float64 else torch.complex64
        kept = self._turns
        alike = kept is not None and (kept.device, kept.dtype) == (like.device, kind)
        if kept is None or not alike or kept.shape[0] < seq_len:
            positions = torch.arange(seq_len, device=like.device)
            kept = rotations(positions, self.cfg.d_k, self.rope_base, like.dtype)
            self._turns = kept
        return kept[:seq_len]

    def project(self, x: Tensor, turns: Tensor) -> Branches:
        """Turned queries and keys, values and gates of every branch for x [B,S,dim].

        turns: `turns` of S, complex, or as real numbers [S, d_k/2, 2] where a compiler reads this.
        """
        made = linear(x, aligned(self.in_proj.weight))
        parts = split_projection(made, self.gate_bias, turns, self.cfg)
        if self.cfg.phi == "avg":
            return parts
        return replace(
            parts,
            k_cmp=self.compress_k(parts.k_cmp).to(parts.q.dtype),
            v_cmp=self.compress_v(parts.v_cmp).to(parts.q.dtype),
        )

    def attend(self, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `forward` gives for x, gates [B,G,S,h,3] and chosen blocks [B,S,G,n_sel]."""
        parts = self.project(x, turns)
        out, blocks = attend(parts, self.cfg, self.way)
        gates = group_queries(parts.gates.detach(), self.cfg)
        return self.out_proj(out.flatten(2)), gates, blocks

    def forward(self, x: Tensor) -> Tensor:
        """Attend within x [B,S,dim]; returns [B,S,dim]."""
        out, self.last_gates, self.last_blocks = self.attend(x, self.turns(x.shape[1], x))
        return out

    def gate_numbers(self) -> Tensor:
        """Of this layer what `gate_stats` averages, as a float64 tensor [7] (no synchronization).

        Raises NSAError before the first forward pass.
        """
        if self.last_gates is None or self.last_blocks is None:
            raise NSAError("gate statistics need a forward pass first: call the layer once")
        gates = self.last_gates.double()
        share = gates / gates.sum(-1, keepdim=True).clamp_min(1e-12)
        entropy = -torch.xlogy(share, share).sum(-1).mean() / math.log(3)
        chosen = self.last_blocks >= 0
        seq_len = chosen.shape[1]
        current = torch.arange(seq_len, device=gates.device) // self.cfg.l_sel
        forced = (current + 1).clamp_max(FORCED_INITIAL_BLOCKS + FORCED_LOCAL_BLOCKS)
        mean_blocks = chosen.sum(-1).double().mean()
        forced_share = forced.double().mean() / mean_blocks
        branch = share.flatten(0, -2).mean(0)
        rest = torch.stack((mean_blocks, forced_share))
        return torch.cat((entropy[None], share.amax(-1).mean()[None], branch, rest))


def gate_stats(numbers: Tensor) -> dict[str, float]:
    """Health of the gates and of the selection, by the names of gates.csv's columns.

    From the `gate_numbers` of every layer [n_layers, 7], averaged over tokens and heads. entropy:
    of the three gates normalized to shares, over ln 3 (1 balanced, 0 collapsed), of the layer where
    it is lowest. max_gate: largest share, of the layer where it is largest; a mean over layers
    would hide one that has collapsed. The others are means over the layers.
    """
    entropy, largest, *_ = numbers.unbind(1)
    found = torch.cat((entropy.amin(0, keepdim=True), largest.amax(0, keepdim=True)))
    told = torch.cat((found, numbers.mean(0))).tolist()
    return dict(zip(names(GATES_COLUMNS)[1:], told, strict=True))
