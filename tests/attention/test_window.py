"""The window branch through torch's `varlen_attn`, on a CPU that is lent a flash kernel."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa
from nsa.attention import attend, choose_window, nsa_attention
from nsa.attention import window as window_module
from nsa.attention.branches import Branches
from nsa.config import Way
from nsa.contract import NSAError
from tests.attention.flash_on_cpu import flash_on_cpu
from tests.attention.test_proofs import NAMES, gap, inputs

CPU = torch.device("cpu")
SMALL = nsa.NSAConfig(
    dim=24, n_heads=6, n_kv_groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=4, w=10
)
LENGTHS = (1, 7, 10, 11, 33, 77)


def shares_heads() -> bool:
    """Does this torch's varlen_attn let query heads share a key? 2.11's does not."""
    plain = window_module._varlen()
    return "enable_gqa" in inspect.signature(plain).parameters


def both(seq_len: int) -> list[list[Tensor]]:
    """Output and gradients of the reference, and of SDPA with varlen_attn."""
    found = []
    for path, kernels in (("reference", "masked"), ("batched", "varlen")):
        x = inputs(SMALL, seq_len, batch=2, seed=seq_len)
        out, _ = attend(Branches(**x), SMALL, Way(path=path, force_sdpa=True, kernels=kernels))
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found.append([out, *torch.autograd.grad((out * weight).sum(), list(x.values()))])
    return found


def is_the_reference(seq_len: int, heads: int) -> None:
    """Layout, scale, window, shared heads, and two sequences that do not see each other."""
    with flash_on_cpu() as flash:
        reference, varlen = both(seq_len)
    for name, a, b in zip(("out", *NAMES), reference, varlen, strict=True):
        assert gap(a, b) <= 1e-12, name
    assert flash.windows == [(SMALL.w - 1, 0)]
    tokens = 2 * seq_len
    assert flash.shapes == [((tokens, 6, 8), (tokens, heads, 8), (tokens, heads, 8))]


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_varlen_is_the_reference(seq_len: int) -> None:
    is_the_reference(seq_len, heads=2 if shares_heads() else 6)


def _torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """The signature of torch 2.11, which asks for as many heads of keys as of queries."""
    from torch.nn.attention.varlen import varlen_attn

    assert query.shape[1] == key.shape[1] == value.shape[1]
    given = {"scale": scale, "window_size": window_size}
    return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **given)


def test_a_torch_without_shared_heads_gets_a_copy_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "_varlen", lambda: _torch_2_11)
    with flash_on_cpu():
        assert chosen().value == "varlen"
    is_the_reference(33, heads=6)


def test_a_layer_runs_it_without_a_copy() -> None:
    """Queries, keys and values reach the operator as they lie in the projection's result.

    Where heads cannot share a key, keys are copied, and only they.
    """
    layer = nsa.NSAAttention(
        nsa.NSAConfig(**{**vars(SMALL), "dim": 48}), Way(force_sdpa=True, kernels="varlen")
    )
    x = torch.randn(2, 33, 48)
    kept: list[int] = []
    plain = window_module._varlen()

    @functools.wraps(plain)
    def seen(q: Tensor, k: Tensor, v: Tensor, *args: Any, **given: Any) -> Tensor:
        kept.extend(t.untyped_storage().data_ptr() for t in (q, k))
        return plain(q, k, v, *args, **given)

    with flash_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_module, "_varlen", lambda: seen)
        varlen = layer(x)
    layer.way = Way(force_sdpa=True)
    assert gap(varlen, layer(x)) <= 1e-5
    assert (kept[0] == kept[1]) is shares_heads(), "one product turned both"


# -- which way, and why ----------------------------------------------------------------------------


def chosen(**changes: Any) -> nsa.attention.PathChoice:
    given = {"dtype": torch.bfloat16, "device": CPU, **changes}
    cfg = given.pop("cfg", SMALL)
    return choose_window(cfg, **given)


def test_auto_is_varlen_where_it_can_run() -> None:
    assert chosen().value == "masked"
    assert "no flash attention for device cpu" in chosen().reason
    with flash_on_cpu():
        assert chosen().value == "varlen"
        assert torch.__version__ in chosen().reason
        assert chosen(asked="masked") == nsa.attention.PathChoice(
            value="masked", reason="asked for by name"
        )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": torch.float32}, "flash attention has no float32"),
        ({"use_flash": False}, "flash kernels are switched off"),
        ({"cfg": nsa.NSAConfig(d_v=32)}, "d_k=64, d_v=32"),
        ({"cfg": nsa.NSAConfig(d_k=12, d_v=12)}, "a multiple of 8"),
        ({"cfg": nsa.NSAConfig(d_k=264, d_v=264)}, "up to 256"),
        ({"device": torch.device("meta")}, "device meta"),
    ],
)
def test_what_flash_attention_cannot_is_said(changes: dict[str, Any], why: str) -> None:
    with flash_on_cpu():
        assert chosen(**changes).value == "masked"
        assert why in chosen(**changes).reason
        with pytest.raises(NSAError, match="allowed here: auto, masked"):
            chosen(asked="varlen", **changes)


@pytest.mark.parametrize(
    ("way", "why"),
    [
        (Way(kernels="varlen"), "kernels='varlen': this torch has no flash attention"),
        (Way(kernels="triton"), "kernels='triton': Triton needs a CUDA device"),
    ],
)
def test_the_public_function_refuses_what_cannot_run(way: Way, why: str) -> None:
    x = inputs(SMALL, 12, dtype=torch.bfloat16)
    with pytest.raises(NSAError, match=why):
        nsa_attention(**x, cfg=SMALL, way=way)
