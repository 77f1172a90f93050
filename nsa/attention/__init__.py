"""Native Sparse Attention as functions of tensors: without tricks, and how a call will run.

`sequential` is the equations as they are, `batched_cpu` and `batched_sdpa` compute the same, fast.
The module on top is `nsa.layer.NSAAttention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from nsa.attention.branches import CHUNK_BYTES, Branches
from nsa.attention.cpu import batched_cpu
from nsa.attention.cpu.pieces import one_piece
from nsa.attention.sdpa import batched_sdpa
from nsa.attention.selection import (
    accumulate_dtype,
    block_map,
    build_ranges,
    compress,
    full_float32,
    group_queries,
    pick_blocks,
)
from nsa.attention.triton import triton_problem
from nsa.config import BATCHED, NSAConfig, Ranges, Way
from nsa.contract import NSAError, raise_problems


def _probabilities(q: Tensor, k: Tensor, cfg: NSAConfig, seen: Tensor | None = None) -> Tensor:
    """Of q [B,G,1,h,Dk] on all keys [B,G,T,Dk], or those that are seen [B,G,1,T]: [B,G,1,h,T]."""
    logits = torch.einsum("bgchd,bgtd->bgcht", q, k) * cfg.d_k**-0.5
    if seen is not None:
        logits = logits.masked_fill(~seen[:, :, :, None], float("-inf"))
    p: Tensor = logits.softmax(-1)
    return p


def _weighted(p: Tensor, v: Tensor) -> Tensor:
    """Sums [B,G,1,h,Dv] of values [B,G,T,Dv] by probabilities."""
    return torch.einsum("bgcht,bgtd->bgchd", p, v)


def attend_selected(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, cfg: NSAConfig) -> Tensor:
    """Attention of one token's q [B,G,1,h,Dk] on ranges [B,1,G,n,2] in k, v [B,G,T,D] up to it."""
    seq_len = k.shape[2]
    chosen = block_map(ranges, cfg.n_blocks(seq_len), cfg).transpose(1, 2)
    tokens = chosen.repeat_interleave(cfg.l_sel, -1)[..., :seq_len]
    return _weighted(_probabilities(q, k, cfg, tokens), v)


def sequential(x: Branches, cfg: NSAConfig, version: Ranges) -> tuple[Tensor, Tensor]:
    """Token by token, against all before it: output [B,S,H,Dv] and the blocks [B,S,G,n_sel].

    Half types are computed in float32 throughout and rounded once, at the end.
    """
    dtype = x.q.dtype
    wide = x.to(accumulate_dtype(dtype))
    queries, gates = group_queries(wide.q, cfg), group_queries(wide.gates, cfg)
    k_cmp, v_cmp = (compress(t, cfg).transpose(1, 2) for t in (wide.k_cmp, wide.v_cmp))
    k_sel, v_sel, k_win, v_win = (
        t.transpose(1, 2) for t in (wide.k_sel, wide.v_sel, wide.k_win, wide.v_win)
    )
    outputs, picked = [], []
    for t in range(x.q.shape[1]):
        past, near = slice(t + 1), slice(max(0, t + 1 - cfg.w), t + 1)
        q, position = queries[:, :, t : t + 1], torch.tensor([t], device=x.q.device)
        ended = slice(cfg.n_compressed(t + 1))
        p_cmp = _probabilities(q, k_cmp[:, :, ended], cfg)
        blocks = pick_blocks(p_cmp, position, cfg.n_blocks(t + 1), cfg).transpose(1, 2)
        ranges = build_ranges(blocks, cfg, version, position)
        branches = (
            _weighted(p_cmp, v_cmp[:, :, ended]),
            attend_selected(q, k_sel[:, :, past], v_sel[:, :, past], ranges, cfg),
            _weighted(_probabilities(q, k_win[:, :, near], cfg), v_win[:, :, near]),
        )
        # Equation 5.
        mixed = (torch.stack(branches, -1) * gates[:, :, t : t + 1, :, None]).sum(-1)
        outputs.append(mixed.transpose(1, 2).flatten(2, 3))
        picked.append(blocks)
    return torch.cat(outputs, 1).to(dtype), torch.cat(picked, 1)


def attend(x: Branches, cfg: NSAConfig, way: Way = BATCHED) -> tuple[Tensor, Tensor]:
    """`nsa_attention`, returning the selected blocks [B,S,G,n_sel] beside the output.

    Asks for kernels as they are named, whether they can run or not.
    """
    x.check(cfg)
    # Autocast would quietly round the scores that choose blocks; types are the caller's here. A
    # compiler knows no change of precision: what chooses blocks makes its own, out of its sight.
    compiling = torch.compiler.is_compiling()
    precise = nullcontext() if compiling else full_float32()
    with torch.autocast(x.q.device.type, enabled=False), precise:
        if way.path == "sequential":
            return sequential(x, cfg, way.selection_ranges)
        # A compiler does not look into pieces that numbers decide.
        if way.by_sdpa(x.q.device.type) or compiling:
            return batched_sdpa(x, cfg, way)
        return batched_cpu(x, cfg, way.selection_ranges)


def nsa_attention(
    x: Branches,
    cfg: NSAConfig,
    way: Way = BATCHED,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Native Sparse Attention (arXiv 2502.11089, equation 5): output [B,S,H,Dv] in q's type.

    way: how it runs (`choose_path` says which implementation of "batched" and why). Its kernels are
    "masked" (torch's SDPA, anywhere) or "triton" (of this package, for all branches and the choice
    of blocks).

    cu_seqlens: sequences packed into one row (B = 1): where each begins, and S; [n + 1] integers
    from 0, ascending. None sees another, and each has blocks of its own, from its first token on;
    the compressed keys of phi "mlp" are packed too. The sequences run one by one, so many short
    ones take many launches; a tensor on a device is read by the host, which waits for it.

    Types: pooling, the compressed branch and everything that chooses blocks run in at least
    float32, so half types select what float32 would from the same rounded inputs; exact ties go
    to the lower block. A branch with nothing visible contributes exactly 0.

    Raises NSAError (a ValueError) that lists every wrong argument.
    """
    q = x.q
    problem = triton_problem(cfg, q.dtype, q.device) if way.kernels == "triton" else None
    errors = [f"kernels='{way.kernels}': {problem}; use 'masked'"] if problem else []
    if cu_seqlens is None:
        raise_problems("nsa_attention", errors)
        return attend(x, cfg, way)[0]
    begins = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    told = f"cu_seqlens {begins[:8]}{'...' if len(begins) > 8 else ''}"
    if q.shape[0] != 1:
        errors.append(f"{told} with B={q.shape[0]}: packed sequences are one row, B=1")
    rising = all(first < then for first, then in pairwise(begins))
    if (*begins[:1], *begins[-1:]) != (0, q.shape[1]) or not rising:
        errors.append(f"{told}: must ascend from 0 to S={q.shape[1]}, without empty sequences")
    raise_problems("nsa_attention", errors)
    return torch.cat([attend(one, cfg, way)[0] for one in _sequences(x, begins, cfg)], dim=1)


def _sequences(x: Branches, begins: list[int], cfg: NSAConfig) -> Iterator[Branches]:
    """Each packed sequence by itself; the compressed keys of phi "mlp" by their own counts."""
    n_keys = [cfg.n_compressed(end - begin) for begin, end in pairwise(begins)]
    of_keys = begins if cfg.phi == "avg" else [0, *accumulate(n_keys)]
    for rows, keys in zip(pairwise(begins), pairwise(of_keys), strict=True):
        part = {"k_cmp": slice(*keys), "v_cmp": slice(*keys)}
        named = x.named().items()
        yield Branches(**{name: one[:, part.get(name, slice(*rows))] for name, one in named})


@dataclass(frozen=True, kw_only=True)
class PathChoice:
    """The implementation chosen (`value`) and the reason, for people and for env.json."""

    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})"


def choose_selected(
    cfg: NSAConfig,
    asked: str = "auto",
    *,
    seq_len: int | None = None,
    dtype: torch.dtype,
    device: torch.device,
) -> PathChoice:
    """Say whether this package's kernels should run all branches off the CPU, or SDPA, and why.

    asked: "1" (the Triton kernels), "0" (SDPA) or "auto", the kernels where they can run. Whether
    the device computes them rightly is for a test on the device to say. Raises NSAError where they
    are asked for by name and cannot run.
    """
    if asked == "0":
        return PathChoice(value="sdpa", reason="Triton kernels are switched off")
    problem = triton_problem(cfg, dtype, device, seq_len)
    if problem and asked == "1":
        raise NSAError(f"NSA_USE_TRITON_SEL=1: {problem}; allowed here: 0, auto")
    if problem:
        return PathChoice(value="sdpa", reason=problem)
    why = "asked for by name" if asked == "1" else "no mask, no copied keys"
    return PathChoice(value="triton", reason=why)


def choose_path(cfg: NSAConfig, seq_len: int, *, device: str = "cpu") -> PathChoice:
    """Say how `nsa_attention` will run "batched" for this config, length and device type."""
    if device != "cpu":
        rows = f"queries by chunks of {CHUNK_BYTES >> 20} MiB"
        return PathChoice(value="sdpa", reason=f"device {device}: masked SDPA, {rows}")
    full = cfg.n_sel * cfg.l_sel
    value, reason = "cpu_block", f"> n_sel*l_sel={full}: later queries attend block by block"
    if seq_len <= full:
        value, reason = "cpu_dense", f"<= n_sel*l_sel={full}: every query selects all it sees"
    elif one_piece(cfg, seq_len, torch.float32):
        value, reason = "cpu_masked", "is one product of all queries and keys, blocks by a mask"
    return PathChoice(value=value, reason=f"S={seq_len} {reason}")
