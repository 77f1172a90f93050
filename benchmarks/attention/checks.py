"""What the arms of `attention_gpu` compute: inputs, and the truth in float64 beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.attention.peers import Peer
from nsa.attention import attend
from nsa.attention.branches import Branches
from nsa.config import Kernels, NSAConfig, Way

# The production shape.
CFG = NSAConfig()
# As shares of the largest true value. bfloat16 rounds probabilities, a branch and the sum to 8
# bits, at most five times on the way; float32 has the project's bound for paths.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 5 * 2.0**-8}
# Of the queries, how many may have chosen other blocks by rounding; they are not compared.
SAME_BLOCKS = 0.99
NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
Arm = Callable[[], tuple[Tensor, Sequence[Tensor]]]


def cfg_of(x: dict[str, Tensor]) -> NSAConfig:
    """The config that these inputs are of: all but heads and widths as in production."""
    (heads, d_k), (groups, d_v) = x["q"].shape[2:], x["v_sel"].shape[2:]
    return replace(CFG, n_heads=heads, n_kv_groups=groups, d_k=d_k, d_v=d_v)


def inputs(
    seq_len: int, dtype: torch.dtype, device: str, batch: int = 1, cfg: NSAConfig = CFG
) -> dict[str, Tensor]:
    """Queries, keys, values and gates of `batch` sequences."""
    generator = torch.Generator().manual_seed(seq_len)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, seq_len, *shape, generator=generator).to(device, dtype)

    x = {"q": normal(cfg.n_heads, cfg.d_k)}
    for branch in ("cmp", "sel", "win"):
        x[f"k_{branch}"] = normal(cfg.n_kv_groups, cfg.d_k)
        x[f"v_{branch}"] = normal(cfg.n_kv_groups, cfg.d_v)
    x["gates"] = normal(cfg.n_heads, 3).sigmoid()
    return {name: x[name].requires_grad_() for name in NAMES}


def ours(x: dict[str, Tensor], kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Output and blocks."""
    return attend(Branches(**x), cfg_of(x), Way(kernels=kernels))


def called(peer: Peer, x: dict[str, Tensor]) -> Tensor:
    """The peer's output [B,S,H,Dv]. Raises RuntimeError if it has another shape."""
    cfg = cfg_of(x)
    out = peer(**x, cfg=cfg)
    wanted = (*x["q"].shape[:3], cfg.d_v)
    if tuple(out.shape) != wanted:
        raise RuntimeError(f"the output has shape {tuple(out.shape)}, not {wanted}")
    return out


def gradients(result: Tensor, leaves: Sequence[Tensor], same: Tensor) -> list[Tensor]:
    """The compared output, and gradients of a fixed weighting of it, both where `same` is true.

    That of a leaf without effect is 0.
    """
    weight = torch.linspace(-1, 1, result.shape[-1], device=result.device) * same
    total = (result.double() * weight).sum()
    grads = torch.autograd.grad(total, list(leaves), materialize_grads=True)
    return [result * same, *grads]


def largest_error(mine: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest difference, each as a share of the largest true value of its tensor."""
    return max(
        float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max())
        for a, b in zip(mine, truth, strict=True)
    )


def check_peer(x: dict[str, Tensor], check_to: int, peer: Peer) -> tuple[float, str]:
    """Error against float64 by the peer's own equations, and what was compared.

    Which blocks it chose is not known, so only tokens that see no more than n_sel of them decide;
    of later ones the share is told that agrees.
    """
    cfg, out = peer.own_cfg(cfg_of(x)), called(peer, x)
    seq_len, kept = out.shape[1], min(out.shape[1], check_to)
    wide = {n: value.detach()[:, :kept].double().requires_grad_() for n, value in x.items()}
    truth, _ = attend(Branches(**wide), cfg, Way(path="sequential"))
    taking_all = min(kept, cfg.n_sel * cfg.l_sel)
    if seq_len == taking_all:
        same = torch.ones((), dtype=torch.float64, device=out.device)
        pairs = ((out, x), (truth, wide))
        mine, right = (gradients(result, list(leaves.values()), same) for result, leaves in pairs)
        return largest_error(mine, right), "outputs and gradients"
    error = largest_error([out[:, :taking_all]], [truth[:, :taking_all]])
    apart = (out[:, :kept].double() - truth).abs().amax(-1)
    share = float((apart <= BOUND[out.dtype] * truth.abs().max()).double().mean())
    first = f"outputs of the first {taking_all}, which take all blocks"
    return error, f"{first}; {share:.1%} of those to {kept} agree"


def check_sparse(x: dict[str, Tensor], check_to: int, kernels: Kernels) -> tuple[float, str]:
    """Error against token by token in float64, and what was compared."""
    seq_len = x["q"].shape[1]
    kept = min(seq_len, check_to)
    # A block that begins inside and ends outside belongs to neither; l_sel divides check_to.
    short = {name: value[:, :kept] for name, value in x.items()}
    wide = {name: value.detach().double().requires_grad_() for name, value in short.items()}
    truth, theirs = attend(Branches(**wide), cfg_of(x), Way(path="sequential"))
    out, mine = ours(x, kernels)
    same = (theirs == mine[:, :kept, :, : theirs.shape[-1]]).all(-1).all(-1)
    share = float(same.double().mean())
    if share < SAME_BLOCKS:
        return float("inf"), f"only {share:.1%} of the queries chose the blocks of float64"
    same = same[..., None, None]
    if kept < seq_len:
        error = largest_error([out[:, :kept] * same], [truth * same])
        if kernels == "masked":
            return error, f"outputs of the first {kept}"
        beside = beside_masks(x, out, mine)
        # Both sides round.
        return max(error, beside / 2), f"outputs of the first {kept}; everything beside masks"
    mine_, truth_ = (
        gradients(result, list(leaves.values()), same)
        for result, leaves in ((out, x), (truth, wide))
    )
    return largest_error(mine_, truth_), "outputs and gradients"


def beside_masks(x: dict[str, Tensor], out: Tensor, blocks: Tensor) -> float:
    """Error of output and gradients at the whole length against the same by masks.

    The reference would need S x S numbers; masks go through torch's own kernels.
    """
    other, theirs = ours(x, "masked")
    same = (blocks == theirs).all(-1).all(-1)[..., None, None]
    mine, right = (gradients(result, list(x.values()), same) for result in (out, other))
    return largest_error(mine, right)


def check_dense(arm: Arm, check_to: int) -> tuple[float, str]:
    """The same for dense attention."""
    out, leaves = arm()
    kept = min(out.shape[1], check_to)
    wide = [leaf.detach()[:, :, :kept].double().requires_grad_() for leaf in leaves]
    q, k, v = wide
    times = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(times, 1) for part in (k, v))
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    ahead = torch.ones(kept, kept, dtype=torch.bool, device=q.device).triu_(1)
    truth = (logits.masked_fill(ahead, float("-inf")).softmax(-1) @ v).transpose(1, 2)
    if kept < out.shape[1]:
        return largest_error([out[:, :kept]], [truth]), f"outputs of the first {kept}"
    same = out.new_ones(())
    mine, right = gradients(out, leaves, same), gradients(truth, wide, same.double())
    return largest_error(mine, right), "outputs and gradients"
