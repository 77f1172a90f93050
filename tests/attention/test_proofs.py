"""What every path does at the edges of the definition: ties, nothing visible, huge scores, NaN.

The definition's properties (a) to (k) are in `test_proofs_on_device`, on every path too.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa
from nsa.attention import attend, compressed
from nsa.attention.branches import Branches
from nsa.config import Way
from nsa.projection import rotate_into, rotations

WAYS = {
    **{path: Way(path=path) for path in ("reference", "sequential", "batched")},
    "sdpa": Way(force_sdpa=True),
}
SMALL = nsa.NSAConfig(
    dim=24, n_heads=6, n_kv_groups=2, d_k=8, d_v=6, l=8, d=4, l_sel=8, n_sel=4, w=10
)
NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")


def inputs(
    cfg: nsa.NSAConfig,
    seq_len: int,
    *,
    batch: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    groups = cfg.n_kv_groups
    x = {"q": normal(batch, seq_len, cfg.n_heads, cfg.d_k)}
    for branch in ("cmp", "sel", "win"):
        x[f"k_{branch}"] = normal(batch, seq_len, groups, cfg.d_k)
        x[f"v_{branch}"] = normal(batch, seq_len, groups, cfg.d_v)
    x["gates"] = normal(batch, seq_len, cfg.n_heads, 3).sigmoid()
    return {name: value.requires_grad_() for name, value in x.items()}


def run(x: dict[str, Tensor], cfg: nsa.NSAConfig, path: str) -> Tensor:
    return attend(Branches(**x), cfg, WAYS[path])[0]


def only(x: dict[str, Tensor], branch: int) -> dict[str, Tensor]:
    """The same inputs with one gate open."""
    gates = torch.zeros_like(x["gates"])
    gates[..., branch] = 1.0
    return {**x, "gates": gates.requires_grad_()}


def dense(x: dict[str, Tensor], branch: str, cfg: nsa.NSAConfig) -> Tensor:
    """Dense causal attention with a branch's keys and values, written out.

    By no kernel, so that it is the same whichever kernels SDPA may take.
    """
    q = x["q"].transpose(1, 2)
    k, v = (
        x[f"{kind}_{branch}"].repeat_interleave(cfg.heads_per_group, 2).transpose(1, 2)
        for kind in "kv"
    )
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("only_one", [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
def test_the_dense_truth_is_computed_by_no_kernel(only_one: SDPBackend) -> None:
    """Neither takes float64: what is held against one of them must not need it."""
    x = inputs(SMALL, 9)
    with sdpa_kernel([only_one]):
        found = dense(x, "win", SMALL)
    assert gap(found[:, 0], x["v_win"][:, 0].repeat_interleave(SMALL.heads_per_group, 1)) <= 1e-12


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


@pytest.mark.parametrize("width", [2, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_turning_works_in_any_layout(width: int, dtype: torch.dtype) -> None:
    """Odd strides take another way through the code than even ones."""
    turns = rotations(torch.arange(5), width, 100.0, dtype)
    source = torch.randn(1, 5, 3, width + 1).to(dtype)[..., 1:].transpose(1, 2)
    target = torch.empty_like(source.contiguous())
    rotate_into(source, turns, target)
    angle = torch.arange(5.0)[:, None] * 100.0 ** (-torch.arange(0.0, width, 2) / width)
    a, b = source[..., 0::2].float(), source[..., 1::2].float()
    real, imaginary = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert gap(target[..., 0::2].float(), real) <= bound
    assert gap(target[..., 1::2].float(), imaginary) <= bound


@pytest.mark.parametrize("path", WAYS)
def test_nothing_visible_contributes_exactly_zero(path: str) -> None:
    x = only(inputs(SMALL, 30), 0)
    out = run(x, SMALL, path)
    assert bool((out[:, : SMALL.l - 1] == 0).all()) and bool((out[:, SMALL.l - 1 :] != 0).any())


@pytest.mark.parametrize("path", WAYS)
def test_large_scores_neither_overflow_nor_underflow(path: str) -> None:
    """Scores of plus and minus thousands: one key takes all, hidden ones still nothing."""
    x = {n: v.detach().float() for n, v in inputs(SMALL, 90).items()}
    x["q"] = x["q"] * 300
    assert bool(run(x, SMALL, path).isfinite().all())
    # Where everything is selected, rounding cannot choose other blocks.
    early = {n: v[:, :32] for n, v in x.items()}
    wide = {n: v.double() for n, v in early.items()}
    assert gap(run(early, SMALL, path).double(), run(wide, SMALL, "reference")) <= 1e-2


@pytest.mark.parametrize("path", WAYS)
def test_a_nan_is_reported_not_hidden(path: str) -> None:
    x = {n: v.detach().clone() for n, v in inputs(SMALL, 60).items()}
    x["q"][0, 3] = float("nan")
    out = run(x, SMALL, path)
    assert bool(out[0, 3].isnan().all()) and bool(out[0, :3].isfinite().all())


@pytest.mark.parametrize(
    ("n_rows", "pieces"),
    [(12_102, 6), (24_390, 30), (300, 1), (512, 2), (8_191, 1)],
)
def test_pieces_are_equal_and_not_short(n_rows: int, pieces: int) -> None:
    """6 query heads of 2,017 queries, a prime number, make no more than 6; 8,191 is prime."""
    assert compressed._pieces(n_rows, torch.device("cuda")) == pieces
    assert compressed._pieces(n_rows, torch.device("cpu")) == 1


@pytest.mark.parametrize("pieces", [1, 2, 6])
def test_the_sum_over_rows_does_not_depend_on_the_pieces(
    monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    """Two chunks of rows, the second added to the first, against an explicit sum in float64."""
    monkeypatch.setattr(compressed, "_pieces", lambda *_: pieces)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, 24, width, generator=generator, dtype=torch.float64) for width in (5, 4))
    first = compressed._add_product(None, a, b)
    both = compressed._add_product(first.clone(), a, 2 * b)
    right = (a[..., None] * b[:, :, None]).sum(1)
    torch.testing.assert_close(first, right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(both, 3 * right, rtol=1e-12, atol=1e-12)
