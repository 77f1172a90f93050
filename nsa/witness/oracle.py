"""The model's parts a second time, in NumPy and float64: what the trainer's model must compute.

Written from the equations of Native Sparse Attention (arXiv 2502.11089) and of a pre-norm decoder
with rotary positions, RMSNorm and SwiGLU. It shares no code with the trainer, only the names and
shapes of its weights. Every score is written out and masked: to be believed by reading, not fast.

The letters: B sequences, S tokens, P chosen positions, G key/value groups, h query heads of a
group, H = G*h, N compressed blocks, M selection blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nsa.config import ModelConfig, NSAConfig

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]
Weights = Mapping[str, Array]

BRANCHES = ("cmp", "sel", "win")
# Written down again, not read from the trainer.
_ROPE_BASE, _NORM_EPS = 10_000.0, 1e-6
_ERF = np.frompyfunc(math.erf, 1, 1)


@dataclass(frozen=True, kw_only=True)
class Attended:
    """One attention layer at P positions.

    out [B,P,dim]. gates [B,P,H,3], in the order of BRANCHES. scores: importance of each selection
    block, summed over the heads of the group [B,P,G,M].
    """

    out: Array
    gates: Array
    scores: Array


def in_proj_rows(cfg: NSAConfig) -> dict[str, tuple[slice, int, int]]:
    """Rows of `in_proj.weight` by part, with its number of heads and the width of one."""
    parts = {"q": (cfg.n_heads, cfg.d_k)}
    parts |= {f"k_{branch}": (cfg.n_kv_groups, cfg.d_k) for branch in BRANCHES}
    parts |= {f"v_{branch}": (cfg.n_kv_groups, cfg.d_v) for branch in BRANCHES}
    parts["gates"] = (cfg.n_heads, len(BRANCHES))
    found, first = {}, 0
    for name, (heads, width) in parts.items():
        found[name] = (slice(first, first + heads * width), heads, width)
        first += heads * width
    return found


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def rms_norm(x: Array, weight: Array) -> Array:
    """weight * x / sqrt(mean(x^2) + eps), along the last axis."""
    normed: Array = weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + _NORM_EPS)
    return normed


def swiglu(x: Array, gate_up: Array, down: Array) -> Array:
    """W_down (silu(W_gate x) * W_up x); `gate_up` holds W_gate above W_up."""
    w_gate, w_up = np.split(gate_up, 2)
    gate = x @ w_gate.T
    return (gate * sigmoid(gate) * (x @ w_up.T)) @ down.T


def rotate(x: Array, positions: Index) -> Array:
    """Turn components 2i and 2i+1 of x [B,P,heads,D] by the angle position * base^(-2i/D)."""
    width = x.shape[-1]
    angle = positions[:, None] * _ROPE_BASE ** (-np.arange(0, width, 2) / width)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack((even * cos - odd * sin, even * sin + odd * cos), -1).reshape(x.shape)


def compress(cfg: NSAConfig, weights: Weights, name: str, x: Array) -> Array:
    """Equation 7: phi of tokens [i*d, i*d + l) of x [B,S,G,D], for every complete block i."""
    count = max(0, (x.shape[1] - cfg.l) // cfg.d + 1)
    inside = np.arange(count)[:, None] * cfg.d + np.arange(cfg.l)
    blocks = x[:, inside].transpose(0, 1, 3, 2, 4)  # [B,N,G,l,D]
    if cfg.phi == "avg":
        mean: Array = blocks.mean(-2)
        return mean
    blocks = blocks + weights[f"{name}.position"]
    flat = blocks.reshape(*blocks.shape[:3], cfg.l * x.shape[-1])
    y = flat @ weights[f"{name}.net.0.weight"].T + weights[f"{name}.net.0.bias"]
    gelu = 0.5 * y * (1 + np.asarray(_ERF(y / math.sqrt(2)), dtype=np.float64))
    return gelu @ weights[f"{name}.net.2.weight"].T


def attend(q: Array, k: Array, v: Array, seen: Mask) -> tuple[Array, Array]:
    """Softmax attention over the keys that are seen; where none is, exactly 0.

    q [B,P,G,h,Dk], k [B,n,G,Dk], v [B,n,G,Dv], seen [B,P,G,n] (or of size 1): probabilities
    [B,P,G,h,n] and outputs [B,P,G,h,Dv].
    """
    # All rows of a group in one matrix product, which einsum would do number by number.
    rows = q.transpose(0, 2, 1, 3, 4)
    shape, flat = rows.shape[:-1], (*rows.shape[:2], rows.shape[2] * rows.shape[3])
    logits = rows.reshape(*flat, -1) @ k.transpose(0, 2, 3, 1) / math.sqrt(q.shape[-1])
    visible = seen.transpose(0, 2, 1, 3)[..., None, :]
    logits = np.where(visible, logits.reshape(*shape, k.shape[1]), -np.inf)
    peak = logits.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(logits - np.where(np.isfinite(peak), peak, 0.0))
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total > 0, total, 1.0)
    out = p.reshape(*flat, k.shape[1]) @ v.transpose(0, 2, 1, 3)
    return p.swapaxes(1, 2), out.reshape(*shape, v.shape[-1]).swapaxes(1, 2)


def block_scores(cfg: NSAConfig, p: Array, n_blocks: int) -> Array:
    """Equations 9 and 10 for p [B,P,G,h,N]: importance of each selection block [B,P,G,M].

    Selection block j holds the strides u = j*l_sel/d + m. Each of them is inside the compression
    blocks u - n, n < l/d, and adds their probabilities; then all heads of the group are summed.
    """
    p = p.sum(3)
    scores = np.zeros((*p.shape[:3], n_blocks))
    for m in range(cfg.l_sel // cfg.d):
        for n in range(cfg.l // cfg.d):
            i = np.arange(n_blocks) * (cfg.l_sel // cfg.d) + m - n
            real = (i >= 0) & (i < p.shape[-1])
            scores[..., real] += p[..., i[real]]
    return scores


def attention(
    cfg: NSAConfig, weights: Weights, x: Array, *, at: Index, blocks: ArrayLike
) -> Attended:
    """One attention layer for its input x [B,S,dim], at positions `at` [P].

    weights: in_proj.weight, gate_bias, out_proj.weight, for phi "mlp" also those of compress_k and
    compress_v; a missing one is a KeyError. blocks: the selection blocks that are read [B,P,G,n]
    (any order, -1 for none), since a narrower type may choose others.
    """
    every = np.arange(x.shape[1])
    n_blocks = -(-len(every) // cfg.l_sel)
    rows = in_proj_rows(cfg)

    def part(name: str, source: Array) -> Array:
        mine, heads, width = rows[name]
        made = source @ weights["in_proj.weight"][mine].T
        return made.reshape(*source.shape[:2], heads, width)

    gates = sigmoid(part("gates", x[:, at]) + weights["gate_bias"].reshape(cfg.n_heads, -1))
    q = rotate(part("q", x[:, at]), at)
    q = q.reshape(*q.shape[:2], cfg.n_kv_groups, -1, cfg.d_k)
    k = {name: rotate(part(f"k_{name}", x), every) for name in BRANCHES}
    v = {name: part(f"v_{name}", x) for name in BRANCHES}
    k["cmp"] = compress(cfg, weights, "compress_k", k["cmp"])
    v["cmp"] = compress(cfg, weights, "compress_v", v["cmp"])

    last = np.arange(k["cmp"].shape[1]) * cfg.d + cfg.l - 1
    p, cmp = attend(q, k["cmp"], v["cmp"], (last <= at[:, None])[None, :, None])
    chosen = (np.asarray(blocks)[..., None] == np.arange(n_blocks)).any(-2)
    past = (every <= at[:, None])[None, :, None]
    near = (every > at[:, None] - cfg.w)[None, :, None]
    _, sel = attend(q, k["sel"], v["sel"], chosen[..., every // cfg.l_sel] & past)
    _, win = attend(q, k["win"], v["win"], near & past)

    by_branch = np.stack((cmp, sel, win), -1).reshape(*q.shape[:2], cfg.n_heads, cfg.d_v, 3)
    mixed = (gates[..., None, :] * by_branch).sum(-1).reshape(*q.shape[:2], -1)
    return Attended(
        out=mixed @ weights["out_proj.weight"].T,
        gates=gates,
        scores=block_scores(cfg, p, n_blocks),
    )


def layer(
    cfg: ModelConfig, weights: Weights, x: Array, *, at: Index, blocks: ArrayLike
) -> tuple[Array, Attended]:
    """One decoder layer for its input x [B,S,dim]: output [B,P,dim] and its attention.

    `at` and `blocks` as in `attention`.
    """
    normed = rms_norm(x, weights["attention_norm.weight"])
    own = below(weights, "attention.")
    found = attention(cfg.attention, own, normed, at=at, blocks=blocks)
    middle = x[:, at] + found.out
    inner = rms_norm(middle, weights["mlp_norm.weight"])
    return middle + swiglu(inner, weights["mlp.gate_up.weight"], weights["mlp.down.weight"]), found


def head(cfg: ModelConfig, weights: Weights, x: Array) -> Array:
    """Logits [B,P,V] for what the last layer gives, x [B,P,dim]."""
    words = weights["embedding.weight" if cfg.tie_embeddings else "head.weight"]
    return rms_norm(x, weights["norm.weight"]) @ words.T


def below(weights: Weights, prefix: str) -> dict[str, Array]:
    """The weights whose names begin with `prefix`, without it."""
    return {n.removeprefix(prefix): value for n, value in weights.items() if n.startswith(prefix)}
