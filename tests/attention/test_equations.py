"""Every path against the independent NumPy reference, over a generated space; packed rows too."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa import NSAConfig, NSAError
from nsa.attention import attend, nsa_attention
from nsa.attention.branches import Branches
from nsa.attention.cpu import dense
from nsa.config import Way
from tests.attention import equations
from tests.attention.equations import Example, examples, rounded, tensors
from tests.tiers import examples as by_tier

# "pieces": batched, with work cut as only long sequences are.
TORCH_PATHS = ("reference", "sequential", "batched v1", "batched v2", "pieces", "sdpa")
# float64 is rounding only; float32 is the project's bound; bfloat16 is computed in float32 and
# rounded once at the end, which costs half a unit in its 8-bit significand: 2**-8 of the value.
ABSOLUTE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}
RELATIVE = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2.0**-8}
# A choice between blocks whose scores differ by less may go either way in this type.
MARGIN = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}


BF16 = torch.bfloat16


def bounded(max_examples: int) -> settings:
    """The same examples every time, and only so many, of which the fast tier takes fewer."""
    return settings(
        by_tier(max_examples),
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


def run(example: Example, x: dict[str, Tensor], path: str) -> Tensor:
    """Output of one path of the package."""
    cfg = example.config
    if path == "sdpa":
        return attend(Branches(**x), cfg, Way(force_sdpa=True))[0]
    if path == "pieces":
        with patch.multiple(dense, MIN_TOKENS=3, PIECE_BYTES=1):
            return run(example, x, "batched")
    name, _, version = path.partition(" ")
    return nsa_attention(**x, cfg=cfg, way=Way(path=name, selection_ranges=version or "v2"))


def check_output(example: Example, path: str, dtype: torch.dtype) -> None:
    """One path, one type: blocks and output as the equations say."""
    numbers = rounded(example.numbers(), dtype)
    truth = equations.nsa(numbers, example.config)
    assume(truth.margin > MARGIN[dtype])
    x = tensors(numbers, dtype)
    found = attend(Branches(**x), example.config, Way(path="reference"))[1].tolist()
    assert [[[[j for j in g if j >= 0] for g in t] for t in b] for b in found] == truth.blocks
    out = run(example, x, path).detach().double().numpy()
    bound = ABSOLUTE[dtype] + RELATIVE[dtype] * np.abs(truth.out)
    if dtype == torch.bfloat16 and path == "sdpa":
        # Native kernels round probabilities and each branch too: five roundings of the largest.
        bound = 5 * 2.0**-8 * np.abs(truth.out).max() + bound
    worst = float((np.abs(out - truth.out) - bound).max())
    assert worst <= 0, f"{path}, {dtype}: {worst:.1e} beyond the bound"


@pytest.mark.parametrize(
    ("paths", "dtype", "longest", "number"),
    [
        *((path, torch.float64, 300, 40) for path in TORCH_PATHS if path != "sequential"),
        ("sequential", torch.float64, 48, 30),
        *(("batched v2, pieces, reference", kind, 160, 12) for kind in (torch.float32, BF16)),
        ("sdpa", BF16, 64, 10),
    ],
    ids=str,
)
def test_output(paths: str, dtype: torch.dtype, longest: int, number: int) -> None:
    @bounded(number)
    @given(example=examples(longest=longest))
    def over_space(example: Example) -> None:
        for path in paths.split(", "):
            check_output(example, path, dtype)

    over_space()


@pytest.mark.parametrize("path", TORCH_PATHS)
@bounded(25)
@given(example=examples(longest=40))
def test_gradients_against_finite_differences(path: str, example: Example) -> None:
    """Directional derivatives by central differences of the NumPy reference, choice held fixed."""
    numbers = example.numbers()
    truth = equations.nsa(numbers, example.config)
    assume(truth.margin > 1e-12)
    rng = np.random.default_rng(example.seed + 1)
    weight = rng.standard_normal(truth.out.shape)
    x = tensors(numbers, torch.float64)
    total = (run(example, x, path) * torch.tensor(weight)).sum()
    grads = torch.autograd.grad(total, list(x.values()), materialize_grads=True)
    for (name, value), grad in zip(numbers.items(), grads, strict=True):
        way, sides = rng.standard_normal(value.shape), []
        for sign in (1, -1):
            moved = {**numbers, name: value + sign * 1e-6 * way}
            result = equations.nsa(moved, example.config, fixed=truth)
            sides.append(float((result.out * weight).sum()))
        slope = (sides[0] - sides[1]) / 2e-6
        mine = float((grad.numpy() * way).sum())
        scale = max(1.0, float(np.abs(grad.numpy()).sum()) ** 0.5)
        assert abs(mine - slope) <= 2e-7 * scale * max(1.0, abs(slope)), f"{path}: d {name}"


@pytest.mark.parametrize("path", ["batched", "reference"])
@bounded(20)
@given(example=examples(longest=1), lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4))
def test_each_sequence_is_alone(path: str, example: Example, lengths: list[int]) -> None:
    """Lengths of any kind, also below one compressed block: such a sequence has no such key."""
    alone = [
        replace(example, batch=1, seq_len=length, seed=example.seed + number)
        for number, length in enumerate(lengths)
    ]
    parts = [one.numbers() for one in alone]
    truths = [equations.nsa(numbers, one.config) for numbers, one in zip(parts, alone, strict=True)]
    assume(min(truth.margin for truth in truths) > 1e-12)
    packed = {name: np.concatenate([numbers[name] for numbers in parts], 1) for name in parts[0]}
    begins = [0, *np.cumsum(lengths).tolist()]
    x = tensors(packed, torch.float64)
    for cu_seqlens in (begins, torch.tensor(begins, dtype=torch.int32)):
        out = nsa_attention(**x, cfg=example.config, way=Way(path=path), cu_seqlens=cu_seqlens)
        wanted = np.concatenate([truth.out for truth in truths], 1)
        np.testing.assert_allclose(out.detach().numpy(), wanted, rtol=0, atol=1e-12)
    # Nothing of the last sequence reaches the others, backward either.
    others = out[:, : begins[-2]].sum() + 0 * out.sum()
    for name, gradient in zip(x, torch.autograd.grad(others, list(x.values())), strict=True):
        rows = parts[-1][name].shape[1]
        assert not gradient[:, gradient.shape[1] - rows :].any(), name


@pytest.mark.parametrize(
    ("batch", "cu_seqlens", "told"),
    [
        (2, [0, 6], "packed sequences are one row, B=1"),
        (1, [0], "must ascend from 0 to S=6"),
        (1, [1, 6], "must ascend from 0 to S=6"),
        (1, [0, 5], "must ascend from 0 to S=6"),
        (1, [0, 4, 4, 6], "without empty sequences"),
        (1, [0, 5, 4, 6], "must ascend from 0 to S=6"),
    ],
)
def test_what_is_no_packing(batch: int, cu_seqlens: list[int], told: str) -> None:
    cfg = NSAConfig(dim=8, n_heads=2, n_kv_groups=1, d_k=4, d_v=4)
    q = torch.zeros(batch, 6, 2, 4)
    kv = torch.zeros(batch, 6, 1, 4)
    with pytest.raises(NSAError, match=told):
        nsa_attention(q, *[kv] * 6, torch.ones(batch, 6, 2, 3), cfg=cfg, cu_seqlens=cu_seqlens)
