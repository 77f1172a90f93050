"""The attention layer: projections, rotary positions, compression and gates around the core."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nsa.attention.api import attend
from nsa.attention.branches import Branches
from nsa.config import FORCED_INITIAL_BLOCKS, FORCED_LOCAL_BLOCKS, NSAConfig, Path, Ranges
from nsa.errors import NSAError
from nsa.rope import rotate, rotations

BRANCHES = ("cmp", "sel", "win")


@dataclass(frozen=True, kw_only=True)
class GateStats:
    """Health of the gates and of the selection, averaged over tokens, heads and layers.

    entropy: of the three gates normalised to shares, over ln 3 (1 balanced, 0 collapsed).
    max_gate: largest share. share_*: mean share of a branch. sel_blocks_mean: blocks attended
    to. sel_forced_share: part of them that are forced (initial and local).
    """

    entropy: float
    max_gate: float
    share_cmp: float
    share_sel: float
    share_win: float
    sel_blocks_mean: float
    sel_forced_share: float


class BlockCompressor(nn.Module):
    """phi "mlp": a block of l vectors, plus its position embedding, through a small MLP."""

    def __init__(self, width: int, cfg: NSAConfig) -> None:
        super().__init__()
        self.l, self.d = cfg.l, cfg.d
        self.position = nn.Parameter(torch.randn(cfg.l, width) * 0.02)
        self.net = nn.Sequential(
            nn.Linear(cfg.l * width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compress x [B,S,G,D] to [B,N,G,D]; N is 0 when S < l."""
        if x.shape[1] < self.l:
            # Keeps every parameter in the graph, with a zero gradient, for unused-parameter checks.
            nothing = sum(p.sum() * 0 for p in self.parameters())
            return x[:, :0] + nothing
        blocks = x.unfold(1, self.l, self.d).transpose(-1, -2) + self.position
        out: Tensor = self.net(blocks.flatten(-2))
        return out


class NSAAttention(nn.Module):
    """Native Sparse Attention layer: x [B,S,dim] to [B,S,dim].

    Each branch has its own key and value projection; queries are shared. Rotary positions turn
    queries and keys; compressed keys are made from turned keys. Gates are the sigmoid of a linear
    map of the layer's input, one per head and branch. Raises NSAError for an odd d_k.
    """

    def __init__(
        self,
        cfg: NSAConfig,
        *,
        path: Path = "batched",
        selection_ranges: Ranges = "v2",
        use_flash: bool = True,
        rope_base: float = 10_000.0,
    ) -> None:
        super().__init__()
        if cfg.d_k % 2:
            raise NSAError(f"d_k={cfg.d_k}: rotary positions need an even key width")
        self.cfg, self.path, self.use_flash = cfg, path, use_flash
        self.selection_ranges = selection_ranges
        self.force_sdpa = False
        self.rope_base = rope_base
        groups = cfg.n_kv_groups
        self.q_proj = nn.Linear(cfg.dim, cfg.n_heads * cfg.d_k, bias=False)
        # Rows: the three branches' keys (compressed, selected, window), then their values.
        self.kv_proj = nn.Linear(cfg.dim, 3 * groups * (cfg.d_k + cfg.d_v), bias=False)
        self.gate_proj = nn.Linear(cfg.dim, cfg.n_heads * 3)
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
        if (
            kept is None
            or kept.shape[0] < seq_len
            or kept.device != like.device
            or kept.dtype != kind
        ):
            positions = torch.arange(seq_len, device=like.device)
            kept = rotations(positions, self.cfg.d_k, self.rope_base, like.dtype)
            self._turns = kept
        return kept[:seq_len]

    def project(self, x: Tensor, turns: Tensor) -> Branches:
        """Queries, every branch's keys and values, and gates for x [B,S,dim], keys turned."""
        cfg = self.cfg
        q = self.q_proj(x).unflatten(-1, (cfg.n_heads, cfg.d_k))
        kv = self.kv_proj(x)
        keys, values = kv.split((3 * cfg.n_kv_groups * cfg.d_k, 3 * cfg.n_kv_groups * cfg.d_v), -1)
        q = rotate(q, turns)
        k = rotate(keys.unflatten(-1, (3, cfg.n_kv_groups, cfg.d_k)), turns).unbind(2)
        v = values.unflatten(-1, (3, cfg.n_kv_groups, cfg.d_v)).unbind(2)
        gates = self.gate_proj(x).sigmoid().unflatten(-1, (cfg.n_heads, 3)).to(q.dtype)
        named = {f"k_{name}": k[i] for i, name in enumerate(BRANCHES)}
        named |= {f"v_{name}": v[i] for i, name in enumerate(BRANCHES)}
        return Branches(q=q, gates=gates, **named)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within x [B,S,dim]; returns [B,S,dim]."""
        cfg = self.cfg
        branches = self.project(x, self.turns(x.shape[1], x))
        if cfg.phi == "mlp":
            named = branches.named()
            named["k_cmp"] = self.compress_k(branches.k_cmp).to(branches.q.dtype)
            named["v_cmp"] = self.compress_v(branches.v_cmp).to(branches.q.dtype)
            branches = Branches(**named)
        out, blocks = attend(
            branches,
            cfg,
            path=self.path,
            selection_ranges=self.selection_ranges,
            use_flash=self.use_flash,
            force_sdpa=self.force_sdpa,
        )
        self.last_gates, self.last_blocks = branches.gates.detach(), blocks
        projected: Tensor = self.out_proj(out.flatten(2))
        return projected

    def gate_numbers(self) -> Tensor:
        """The fields of GateStats, in order, as a float64 tensor [7] (no synchronisation).

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
        branch = share.flatten(0, 2).mean(0)
        rest = torch.stack((mean_blocks, forced_share))
        return torch.cat((entropy[None], share.amax(-1).mean()[None], branch, rest))
