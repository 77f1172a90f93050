"""The compressed branch's Triton kernels, without a GPU: their work, and compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import nsa
from nsa.attention.triton.tiles import choose_compressed_cut, shape_problem
from nsa.rounding import error_of
from nsa.witness.equations import Bound

CFG = nsa.NSAConfig()
Rounding = Callable[[Tensor], Tensor]


def _gradients_of_keys_rounded(own_sum: bool) -> dict[str, float]:
    """Errors of dq, dk, dv as shares, rounded to bf16 where the kernels do; scores up to 35.

    All keys have a vector in common: it moves every score of a row alike, and so does its rounding.
    """
    draw = torch.Generator().manual_seed(0)
    q, grad, k, v = (
        torch.randn(*shape, 64, generator=draw) for shape in ((256, 6), (256, 6), (15,), (15,))
    )
    q, k = (3 * q).bfloat16().float(), k + 2 * torch.randn(64, generator=draw)
    seen = (torch.arange(15) * 16 + 31 <= torch.arange(31, 256)[:, None])[:, None]
    q, grad = q[31:], grad[31:]

    def scores(keys: Tensor) -> Tensor:
        kind = keys.dtype
        return (q.to(kind) @ keys.T / 8).masked_fill(~seen, -torch.inf)

    def gradients(p: Tensor, keys: Tensor, values: Tensor, half: Rounding) -> dict[str, Tensor]:
        kind = p.dtype
        g = half(grad.to(kind))
        delta = (grad.to(kind) * (half(p) @ values)).sum(-1, keepdim=True)
        ds = half(p * (g @ values.T - delta))
        dk, dv = (torch.einsum("thn,thd->nd", a, b) for a, b in ((ds, q.to(kind)), (half(p), g)))
        return {"dq": ds @ keys, "dk": dk, "dv": dv}

    exact, rounded = scores(k.double()), scores(k.bfloat16().float())
    right = gradients(exact.softmax(-1), k.double(), v.double(), lambda x: x)
    sums = (rounded if own_sum else scores(k)).logsumexp(-1, keepdim=True)
    mine = gradients((rounded - sums).exp(), k.bfloat16().float(), v.bfloat16().float(), _bf16)
    return {name: error_of(mine[name], truth).whole for name, truth in right.items()}


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def test_one_product_for_a_score_is_enough_for_gradients() -> None:
    """bf16, which the interpreter cannot: within the bound of the self-test by the sum of the same

    rounded scores; by the exact sum, whose probabilities do not add up to 1, they would not be.
    """
    bound = Bound.of(torch.bfloat16).whole
    own, exact = (_gradients_of_keys_rounded(own_sum) for own_sum in (True, False))
    assert max(own.values()) <= bound < exact["dq"], (own, exact, bound)


@pytest.mark.parametrize("seq_len", [1, 63, 2048, 4099, 131_072])
def test_pieces_and_tiles_hold_everything(seq_len: int) -> None:
    """Every key is in a tile and every token in a piece; partial sums stay below 1 GiB."""
    cut = choose_compressed_cut(CFG, seq_len, 4)
    n_keys = CFG.n_compressed(seq_len)
    assert (
        cut.n_tiles(n_keys) * cut.owned >= n_keys and cut.n_pieces(seq_len) * cut.piece >= seq_len
    )
    tiles = cut.n_tiles(n_keys) * cut.n_pieces(seq_len) * 4
    assert tiles * cut.owned * (CFG.d_k + CFG.d_v) * 4 < 1 << 30


def test_more_blocks_than_are_kept_sorted() -> None:
    many = nsa.NSAConfig(n_sel=65)
    assert shape_problem(many) == "n_sel=65: the kernels take up to 64"
