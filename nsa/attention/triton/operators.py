"""The kernels as operators of torch: known to autograd, to torch.compile and to profilers.

Of each branch `nsa::NAME` and `nsa::NAME_backward`, and what is between them. triton is imported
when one of them runs, and not before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.attention.opaque import config_of, differentiate, operator
from nsa.attention.triton.tiles import TERMS

# What they are to profilers and dispatch modes.
RANGES_OPERATOR, SELECTED_OPERATOR, WINDOW_OPERATOR = "merged_ranges", "selected", "window"

Three = tuple[Tensor, Tensor, Tensor]


def _attended(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """An output like the values', and a log-sum-exp."""
    batch, seq_len, groups, heads = q.shape[:4]
    out = v.new_empty(batch, seq_len, groups, heads, v.shape[-1])
    return out, k.new_empty(batch * groups, seq_len * heads, dtype=torch.float32)


def _like_inputs(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> Three:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# -- the compressed branch and the choice of blocks ------------------------------------------------


def _compressed(q: Tensor, k: Tensor, v: Tensor, l: int, d: int, phi: str) -> tuple[Tensor, ...]:  # noqa: E741
    out, lse = _attended(q, k, v)
    n_keys = max(0, (k.shape[1] - l) // d + 1) if phi == "avg" else k.shape[1]
    shape = (k.shape[0], n_keys, k.shape[2])
    terms = q.new_empty(*shape, TERMS[str(q.dtype).removeprefix("torch.")], k.shape[3])
    return out.float(), lse, terms, q.new_empty(*shape, v.shape[3]), torch.empty_like(lse)


@operator(_compressed)
def compressed(
    q: Tensor, k: Tensor, v: Tensor, l: int, d: int, phi: str  # noqa: E741
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output float32 [B,S,G,h,Dv] and log-sum-exp to the base 2 [B*G, S*h] of q [B,S,G,h,Dk].

    k and v: [B,S,G,D] of phi "avg", which are pooled, [B,N,G,D] of "mlp". For the gradients are the
    first log-sum-exp and the keys and values that follow; these keys and the last, exact
    log-sum-exp are for `top_blocks`.
    """
    from nsa.attention.triton.compressed import launch

    out, lse, terms, values, exact = launch.forward(q, k, v, config_of(q, v, l=l, d=d, phi=phi))
    return out, lse, terms, values, exact


@operator(_like_inputs)
def compressed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, terms: Tensor,
    values: Tensor, l: int, d: int, phi: str,  # noqa: E741
) -> Three:  # fmt: skip
    """Gradients of q, k and v from that of the output."""
    from nsa.attention.triton.compressed import launch

    cfg = config_of(q, v, l=l, d=d, phi=phi)
    return launch.backward(grad, q, k, v, out, lse, terms, values, cfg)


@operator(lambda q, *given: q.new_empty(*q.shape[:3], given[-1], dtype=torch.int64))
def top_blocks(
    q: Tensor, terms: Tensor, lse: Tensor, l: int, d: int, l_sel: int, n_sel: int  # noqa: E741
) -> Tensor:  # fmt: skip
    """Blocks int64 [B,S,G,n_sel] that q [B,S,G,h,Dk] selects by what `compressed` gives."""
    from nsa.attention.triton.compressed import launch

    return launch.top_blocks(q, terms, lse, config_of(q, q, l=l, d=d, l_sel=l_sel, n_sel=n_sel))


differentiate(compressed, compressed_backward, results=4)


# -- the selected branch ---------------------------------------------------------------------------


def _bits(ranges: Tensor, l_sel: int) -> Tensor:
    batch, seq_len, groups = ranges.shape[:3]
    words = ((seq_len + l_sel - 1) // l_sel + 31) // 32
    return ranges.new_empty(batch * groups, words, seq_len, dtype=torch.int32)


@operator(lambda blocks, l_sel: (blocks.new_empty(*blocks.shape, 2), _bits(blocks, l_sel)))
def merged_ranges(blocks: Tensor, l_sel: int) -> tuple[Tensor, Tensor]:
    """Merged token ranges [B,S,G,n,2] of blocks [B,S,G,n] that ascend, -1 at the end for none.

    And their `selected_bits`.
    """
    from nsa.attention.triton.selected import launch

    return launch.ranges_of(blocks, l_sel)


@operator(_bits)
def selected_bits(ranges: Tensor, l_sel: int) -> Tensor:
    """Blocks that token ranges [B,S,G,n,2] cover, as bits int32 [B*G, words, S]."""
    from nsa.attention.triton.selected import launch

    return launch.bits_of(ranges, l_sel)


@operator(_attended)
def selected(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, l_sel: int, n_sel: int
) -> tuple[Tensor, Tensor]:
    """Output [B,S,G,h,Dv] and log-sum-exp to the base 2 [B*G, S*h] of q [B,S,G,h,Dk]."""
    from nsa.attention.triton.selected import launch

    return launch.forward(q, k, v, bits, config_of(q, v, l_sel=l_sel, n_sel=n_sel))


@operator(_like_inputs)
def selected_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bits: Tensor, out: Tensor, lse: Tensor,
    l_sel: int, n_sel: int,
) -> Three:  # fmt: skip
    """Gradients of q, k and v from that of the output."""
    from nsa.attention.triton.selected import launch

    cfg = config_of(q, v, l_sel=l_sel, n_sel=n_sel)
    return launch.backward(grad, q, k, v, bits, out, lse, cfg)


differentiate(selected, selected_backward)


# -- the window ------------------------------------------------------------------------------------


@operator(_attended)
def window(q: Tensor, k: Tensor, v: Tensor, w: int) -> tuple[Tensor, Tensor]:
    """Output [B,S,G,h,Dv] and log-sum-exp to the base 2 [B*G, S*h] of q [B,S,G,h,Dk]."""
    from nsa.attention.triton import window as launch

    return launch.forward(q, k, v, config_of(q, v, w=w))


@operator(_like_inputs)
def window_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, w: int
) -> Three:
    """Gradients of q, k and v from that of the output."""
    from nsa.attention.triton import window as launch

    return launch.backward(grad, q, k, v, out, lse, config_of(q, v, w=w))


differentiate(window, window_backward)


# -- the gated sum ---------------------------------------------------------------------------------


@operator(lambda cmp, _sel, _win, gates: gates.new_empty(cmp.shape))
def mix(cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor) -> Tensor:
    """Sum of the branches [B,S,H,Dv], each times its gate [B,S,H,3], in the type of the gates."""
    from nsa.attention.triton import between as launch

    return launch.mix_forward(cmp, sel, win, gates)


@operator(lambda _grad, *inputs: tuple(x.new_empty(x.shape) for x in inputs))
def mix_backward(
    grad: Tensor, cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the three branches and of the gates from that of the output."""
    from nsa.attention.triton import between as launch

    return launch.mix_backward(grad, cmp, sel, win, gates)


differentiate(mix, mix_backward, results=0)
