"""Every path equals the equations on small shapes: outputs, gradients and selected blocks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import nsa
from nsa.attention import attend, nsa_attention
from nsa.attention.branches import Branches
from nsa.config import Way
from nsa.tests import maths, pieces

PATHS = ("reference", "sequential", "batched")
# float64 pins the algorithm; float32 (on the same values) pins the path that training runs.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
LENGTHS = (1, 7, 8, 33, 61)
# A shape, inputs of it in float32, and the truth.
_Case = tuple[dict[str, Any], maths.Inputs, dict[str, torch.Tensor]]
# Of a long sequence: the 256th compressed key, the 257th block, the end, and drawn places between.
FOUR_HEADS, LONG = {**maths.SMALL, "n_heads": 4, "n_kv_groups": 2}, 2565
LOOKED_AT = (1027, 1437, 2048, 2175, 2350, 2564)


def _run(x: maths.Inputs, cfg: nsa.NSAConfig, way: Way) -> dict[str, torch.Tensor]:
    out = nsa_attention(**x, cfg=cfg, way=way)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    grads = torch.autograd.grad((out * weight.view_as(out)).sum(), list(x.values()))
    found = {"out": out, **{f"grad {n}": g for n, g in zip(x, grads, strict=True)}}
    return {name: value.detach().cpu().double() for name, value in found.items()}


@cache
def _case(seq_len: int, d_v: int = maths.SMALL["d_v"]) -> _Case:
    """Two rows of this length, and what the equations make of them: the same for every path."""
    shape = {**maths.SMALL, "d_v": d_v}
    x = maths.random_inputs(shape, 2, seq_len, seed=seq_len, dtype=torch.float32)
    return shape, x, _truth(x, shape)


def _held_to_the_equations(case: _Case, way: Way, dtype: torch.dtype) -> None:
    shape, values, truth = case
    x = {name: value.detach().to(dtype).requires_grad_() for name, value in values.items()}
    for name, value in _run(x, nsa.NSAConfig(**shape), way).items():
        worst = float((value - truth[name]).abs().max())
        assert worst <= BOUNDS[dtype], f"{way.path}: {name} is off by {worst:.2e}"


def _truth(x: maths.Inputs, shape: dict[str, Any] = maths.SMALL) -> dict[str, torch.Tensor]:
    leaves = {n: v.detach().cpu().double().requires_grad_() for n, v in x.items()}
    out, _ = maths.attend(leaves, shape)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype)
    total = (out * weight.view_as(out)).sum()
    grads = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return {"out": out.detach(), **{f"grad {n}": g for n, g in zip(leaves, grads, strict=True)}}


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=("float64", "float32"))
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("path", PATHS)
def test_path_equals_the_equations(path: str, seq_len: int, dtype: torch.dtype) -> None:
    _held_to_the_equations(_case(seq_len), Way(path=path), dtype)


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_selected_blocks_equal_the_equations(seq_len: int) -> None:
    cfg = nsa.NSAConfig(**maths.SMALL)
    x = maths.random_inputs(maths.SMALL, 2, seq_len, seed=seq_len, dtype=torch.float64)
    found = attend(Branches(**x), cfg, Way(path="reference"))[1].tolist()
    _, truth = maths.attend(x, maths.SMALL)
    padded = [
        [[g + [-1] * (cfg.n_sel - len(g)) for g in row] for row in element] for element in truth
    ]
    assert found == padded


def test_a_long_sequence_equals_the_equations_where_it_is_looked_at() -> None:
    """Over 600 compressed keys and 300 blocks: what numbers them needs more than a byte."""
    cfg, places = nsa.NSAConfig(**FOUR_HEADS), list(LOOKED_AT)
    x = maths.random_inputs(FOUR_HEADS, 1, LONG, seed=5, dtype=torch.float32)
    weight = torch.linspace(-1, 1, len(places) * cfg.n_heads * cfg.d_v, dtype=torch.float64)
    leaves = {n: v.detach().cpu().double().requires_grad_() for n, v in x.items()}
    truth, chosen = maths.attend(leaves, FOUR_HEADS, places)
    wanted = torch.autograd.grad((truth.flatten() * weight).sum(), list(leaves.values()))
    whole, blocks = attend(Branches(**x), cfg)
    assert blocks[0, places].tolist() == chosen[0]
    out = whole[:, places]
    grads = torch.autograd.grad((out.flatten() * weight.to(out)).sum(), list(x.values()))
    pairs = {"out": (out, truth), **dict(zip(x, zip(grads, wanted, strict=True), strict=True))}
    for name, (value, exact) in pairs.items():
        worst = float((value.detach().cpu().double() - exact.detach()).abs().max())
        assert worst <= BOUNDS[torch.float32], f"{name} is off by {worst:.2e}"


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=("float64", "float32"))
@pytest.mark.parametrize("seq_len", (33, 61))
def test_work_in_small_pieces_equals_the_equations(
    monkeypatch: pytest.MonkeyPatch, seq_len: int, dtype: torch.dtype
) -> None:
    """Pieces are cut by sizes that only long sequences reach; here they are a few tokens."""
    pieces.cut_small(monkeypatch)
    _held_to_the_equations(_case(seq_len), Way(path="batched"), dtype)


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=("float64", "float32"))
def test_masks_in_small_pieces_equal_the_equations(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """By kernels that keep a mask for the backward pass, where each piece's is made again. They
    ask for keys and values of one width.
    """
    pieces.cut_small(monkeypatch)
    way = Way(path="batched", force_sdpa=True)
    _held_to_the_equations(_case(61, maths.SMALL["d_k"]), way, dtype)


def test_the_bound_is_tight_enough_to_see_one_wrong_key() -> None:
    """Made to fail on purpose: a window one token too long is far outside the bound."""
    x = maths.random_inputs(maths.SMALL, 1, 40, seed=0, dtype=torch.float64)
    wrong = nsa.NSAConfig(**{**maths.SMALL, "w": maths.SMALL["w"] + 1})
    difference = _run(x, wrong, Way(path="batched"))["out"] - _truth(x)["out"]
    assert float(difference.abs().max()) > 1e-3
