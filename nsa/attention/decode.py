"""Decoding: one new token at a time against a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa.attention.branches import Branches
from nsa.attention.compression import accumulate_dtype
from nsa.attention.token import attend_token
from nsa.config import NSAConfig, Ranges
from nsa.contract import NSAError, raise_problems

Compressor = Callable[[Tensor], Tensor]
_RAW = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")


class _Rows:
    """Growing [B,T,G,D] storage that doubles, so that appending costs constant time on average."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self.length = 0

    def append(self, rows: Tensor) -> None:
        """Add rows [B,t,G,D] at the end."""
        need = self.length + rows.shape[1]
        if self._memory is None or self._memory.shape[1] < need:
            bigger = rows.new_empty(rows.shape[0], max(64, 2 * need), *rows.shape[2:])
            if self._memory is not None:
                bigger[:, : self.length] = self.view()
            self._memory = bigger
        self._memory[:, self.length : need] = rows
        self.length = need

    def keep_last(self, count: int) -> None:
        """Forget all but the last `count` rows, once that frees half of the memory."""
        if self._memory is not None and self.length > 2 * count + 64:
            kept = self.view()[:, self.length - count :].clone()
            self.length = count
            self._memory[:, :count] = kept

    def view(self) -> Tensor:
        """The rows so far."""
        if self._memory is None:
            raise NSAError("the cache is empty: append the token's keys and values first")
        return self._memory[:, : self.length]


class KVCache:
    """Keys and values of the tokens so far, and the newest token's gates.

    Holds the selected branch's keys and values of every token, the window's of the last w, and
    compressed ones: of each block as soon as its last token arrives, with the raw tokens of the
    block under way. compress_k, compress_v: for phi "mlp", what maps a block [B,G,l,D] to [B,G,1,D]
    (the layer's compressors do).
    """

    def __init__(
        self,
        cfg: NSAConfig,
        *,
        compress_k: Compressor | None = None,
        compress_v: Compressor | None = None,
    ) -> None:
        if cfg.phi == "mlp" and (compress_k is None or compress_v is None):
            raise NSAError('phi="mlp": pass compress_k and compress_v, for example the layer\'s')
        self.cfg = cfg
        self.length = 0
        self.gates: Tensor | None = None
        self._compress = {"k_cmp": compress_k, "v_cmp": compress_v}
        self._raw = {name: _Rows() for name in _RAW}
        self._blocks = {"k_cmp": _Rows(), "v_cmp": _Rows()}

    @torch.no_grad()
    def append(
        self,
        *,
        k_cmp: Tensor,
        v_cmp: Tensor,
        k_sel: Tensor,
        v_sel: Tensor,
        k_win: Tensor,
        v_win: Tensor,
        gates: Tensor,
    ) -> None:
        """Add one token: raw keys and values [B,1,G,D] of each branch, gates [B,1,H,3].

        Raises NSAError if a shape does not fit.
        """
        given = dict(zip(_RAW, (k_cmp, v_cmp, k_sel, v_sel, k_win, v_win), strict=True))
        self._check(given, gates)
        for name, value in given.items():
            self._raw[name].append(value)
        self.length += 1
        self.gates = gates
        if self.length >= self.cfg.l and (self.length - self.cfg.l) % self.cfg.d == 0:
            for name, blocks in self._blocks.items():
                raw = self._raw[name].view()[:, -self.cfg.l :]
                blocks.append(self._compressed(name, raw))
        for name in _RAW:
            branch = name[2:]
            if branch != "sel":
                self._raw[name].keep_last(self.cfg.l if branch == "cmp" else self.cfg.w)

    def _compressed(self, name: str, raw: Tensor) -> Tensor:
        compress = self._compress[name]
        if self.cfg.phi == "avg" or compress is None:
            return raw.to(accumulate_dtype(raw.dtype)).mean(1, keepdim=True)
        return compress(raw.transpose(1, 2)).transpose(1, 2)

    def _check(self, given: dict[str, Tensor], gates: Tensor) -> None:
        cfg, batch, errors = self.cfg, gates.shape[0], []
        for name, value in given.items():
            width = cfg.d_k if name[0] == "k" else cfg.d_v
            if tuple(value.shape) != (batch, 1, cfg.n_kv_groups, width):
                want = (batch, 1, cfg.n_kv_groups, width)
                errors.append(f"{name} has shape {tuple(value.shape)}: must be {want}")
        if tuple(gates.shape) != (batch, 1, cfg.n_heads, 3):
            want = (batch, 1, cfg.n_heads, 3)
            errors.append(f"gates have shape {tuple(gates.shape)}: must be {want}")
        raise_problems("KVCache.append", errors)

    def seen_by_last(self, q: Tensor) -> Branches:
        """What the newest token attends to, with its query q [B,1,H,Dk]: views, nothing copied."""
        if self.gates is None:
            raise NSAError("the cache is empty: append the token's keys and values first")
        named = {name: self._raw[name].view() for name in _RAW}
        for name in ("k_win", "v_win"):
            named[name] = named[name][:, -self.cfg.w :]
        for name, blocks in self._blocks.items():
            named[name] = blocks.view() if blocks.length else named[name][:, :0]
        return Branches(q=q, gates=self.gates, **named)


@torch.no_grad()
def decode_step(
    q: Tensor,
    cache: KVCache,
    cfg: NSAConfig,
    *,
    selection_ranges: Ranges = "v2",
) -> Tensor:
    """Attention of the newest token: q [B,1,H,Dk] to [B,1,H,Dv], exactly as prefill gives it.

    Append the token's own keys, values and gates to the cache first: it attends to itself too.
    Raises NSAError for an empty cache, another config than the cache's, or a wrong shape.
    """
    errors = []
    if cfg != cache.cfg:
        errors.append(f"the cache was made for {cache.cfg}, not for {cfg}")
    if q.dim() != 4 or tuple(q.shape[1:]) != (1, cfg.n_heads, cfg.d_k):
        errors.append(f"q has shape {tuple(q.shape)}: must be [B,1,{cfg.n_heads},{cfg.d_k}]")
    raise_problems("decode_step", errors)
    with torch.autocast(q.device.type, enabled=False):
        wide = cache.seen_by_last(q).to(accumulate_dtype(q.dtype))
        out, _ = attend_token(wide, cache.length - 1, cfg, selection_ranges)
    return out.to(q.dtype)
