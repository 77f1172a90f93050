"""How one call is cut into pieces, and the group-major layout that the pieces work on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.attention.cpu.dense import Piece, compressed_pieces, piece_tokens, window_pieces
from nsa.config import NSAConfig


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The dense pieces of each branch.

    full: the first query that must choose among blocks (or the sequence's length); the ones
    before see at most n_sel blocks, select all, and are plain causal attention.
    """

    cfg: NSAConfig
    seq_len: int
    full: int
    cmp: list[Piece]
    sel: list[Piece]
    win: list[Piece]


def schedule(cfg: NSAConfig, seq_len: int, n: int, like: Tensor) -> Schedule:
    """Cut a sequence with n compressed keys into pieces whose scores fit the cache."""

    def tokens(keys: int) -> int:
        return piece_tokens(cfg.n_kv_groups, cfg.heads_per_group, keys, like.itemsize)

    device, full = like.device, min(seq_len, cfg.n_sel * cfg.l_sel)
    return Schedule(
        cfg=cfg,
        seq_len=seq_len,
        full=full,
        cmp=compressed_pieces(seq_len, cfg.l, cfg.d, tokens(max(1, n)), n, device),
        sel=window_pieces(full, full, tokens(full), device),
        win=window_pieces(seq_len, cfg.w, tokens(min(seq_len, cfg.w)), device),
    )


def rows_of(x: Tensor, groups: int, scale: float | None = None) -> Tensor:
    """Rows [B,G,S*h,D] of x [B,S,H,D]: token by token, the group's heads side by side.

    With a scale the rows are multiplied by it and always a copy; without, do not change them.
    """
    grouped = x.unflatten(2, (groups, -1)).transpose(1, 2)
    if scale is None:
        return grouped.flatten(2, 3).contiguous()
    rows = torch.empty_like(grouped, memory_format=torch.contiguous_format)
    torch.mul(grouped, scale, out=rows)
    return rows.flatten(2, 3)


def heads_of(rows: Tensor, heads: int) -> Tensor:
    """Undo `rows_of`: [B,G,S*h,D] with h heads per group to contiguous [B,S,H,D]."""
    return rows.unflatten(2, (-1, heads)).transpose(1, 2).flatten(2, 3).contiguous()


def major(x: Tensor) -> Tensor:
    """Copy keys or values [B,T,G,D] to [B,G,T,D]."""
    return x.transpose(1, 2).contiguous()


def everything_visible(start: int, stop: int, cfg: NSAConfig, device: torch.device) -> Tensor:
    """Selection of queries that see at most n_sel blocks: [stop - start, n_sel], -1 padded."""
    block = torch.arange(cfg.n_sel, device=device)
    current = torch.arange(start, stop, device=device)[:, None] // cfg.l_sel
    return torch.where(block <= current, block, -1)
