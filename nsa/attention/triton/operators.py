"""The kernels as operators of torch: known to autograd, to torch.compile and to profilers.

A layer's core is four of them, one after the other, of which the last, `nsa::core`, has the
gradients of all. triton is imported when one of them runs, and not before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.attention.tracing import config_of, differentiate, operator
from nsa.attention.triton import TERMS, room_for_bits

# What they are to profilers and dispatch modes.
RANGES_OPERATOR, SELECTED_OPERATOR, WINDOW_OPERATOR = "top_blocks", "core", "window_and_terms"


def _attended(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """An output like the values', and a log-sum-exp."""
    batch, seq_len, groups, heads = q.shape[:4]
    out = v.new_empty(batch, seq_len, groups, heads, v.shape[-1])
    return out, k.new_empty(batch * groups, seq_len * heads, dtype=torch.float32)


def _window_and_terms(
    q: Tensor, k_win: Tensor, v_win: Tensor, k: Tensor, v: Tensor, cfg: str
) -> tuple[Tensor, ...]:
    of = config_of(cfg)
    n_keys = of.n_compressed(k.shape[1]) if of.phi == "avg" else k.shape[1]
    shape = (k.shape[0], n_keys, k.shape[2])
    terms = q.new_empty(*shape, TERMS[str(q.dtype).removeprefix("torch.")], k.shape[3])
    return *_attended(q, k_win, v_win), terms, q.new_empty(*shape, v.shape[3])


@operator(_window_and_terms)
def window_and_terms(
    q: Tensor, k_win: Tensor, v_win: Tensor, k_cmp: Tensor, v_cmp: Tensor, cfg: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Window [B,S,G,h,Dv] and log-sum-exp to the base 2 [B*G, S*h] of q [B,S,G,h,Dk]; pooled keys.

    k_cmp, v_cmp: [B,S,G,D] of phi "avg", which are pooled, [B,N,G,D] of "mlp". What becomes of
    them, keys [B,N,G,terms,Dk] and values [B,N,G,Dv], is as `compressed` takes them.
    """
    from nsa.attention.triton import core as launch

    return launch.window_and_terms(q, k_win, v_win, k_cmp, v_cmp, config_of(cfg))


def _compressed(q: Tensor, terms: Tensor, values: Tensor, _: str) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = _attended(q, terms, values)
    return out.float(), lse, torch.empty_like(lse)


@operator(_compressed)
def compressed(q: Tensor, terms: Tensor, values: Tensor, cfg: str) -> tuple[Tensor, Tensor, Tensor]:
    """Output float32 [B,S,G,h,Dv] and log-sum-exps [B*G, S*h], for `core` and for `top_blocks`."""
    from nsa.attention.triton import compressed as launch

    return launch.attend(q, terms, values, config_of(cfg))


def _top(q: Tensor, _terms: Tensor, _lse: Tensor, cfg: str) -> tuple[Tensor, Tensor]:
    of = config_of(cfg)
    return q.new_empty(*q.shape[:3], of.n_sel, dtype=torch.int64), room_for_bits(q, of.l_sel)


@operator(_top)
def top_blocks(q: Tensor, terms: Tensor, lse: Tensor, cfg: str) -> tuple[Tensor, Tensor]:
    """Blocks int64 [B,S,G,n_sel] that q [B,S,G,h,Dk] selects by what `compressed` gives last.

    And the merged token ranges of these blocks, as `block_bits` has them.
    """
    from nsa.attention.triton import compressed as launch

    return launch.top_blocks(q, terms, lse, config_of(cfg))


def _core(
    q: Tensor, _k: Tensor, _v: Tensor, k_sel: Tensor, v_sel: Tensor, _kw: Tensor, _vw: Tensor,
    gates: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    out = gates.new_empty(*gates.shape[:3], v_sel.shape[3])
    return out, *_attended(q, k_sel, v_sel)


@operator(_core)
def core(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor,  # noqa: ARG001
    k_win: Tensor, v_win: Tensor, gates: Tensor, bits: Tensor, terms: Tensor,  # noqa: ARG001
    values: Tensor, cmp: Tensor, cmp_lse: Tensor, win: Tensor, win_lse: Tensor,  # noqa: ARG001
    cfg: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gated sum [B,S,H,Dv] of the branches; the selected one, which it computes, and its lse.

    bits to win_lse: what the operators before it gave of these tensors. Its gradients are those of
    all branches together, so that these are not differentiated by themselves.
    """
    from nsa.attention.triton import selected as launch

    return launch.forward_mixed(q, k_sel, v_sel, bits, cmp, win, gates, config_of(cfg))


@operator(lambda _grad, *given: tuple(x.new_empty(x.shape) for x in given[:8]))
def core_backward(
    grad: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor,
    k_win: Tensor, v_win: Tensor, gates: Tensor, bits: Tensor, terms: Tensor, values: Tensor,
    cmp: Tensor, cmp_lse: Tensor, win: Tensor, win_lse: Tensor, sel: Tensor, sel_lse: Tensor,
    cfg: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, of keys and values of each branch, and of the gates."""
    from nsa.attention.triton import core as launch

    given = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    kept = (bits, terms, values, cmp, cmp_lse, win, win_lse, sel, sel_lse)
    made = launch.backward(grad, given, kept, config_of(cfg))
    return made[0], made[1], made[2], made[3], made[4], made[5], made[6], made[7]


differentiate(core, core_backward, results=3, first=1)
