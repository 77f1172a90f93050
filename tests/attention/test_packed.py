"""Sequences packed into one row, each against the independent NumPy reference by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from nsa import NSAConfig, NSAError
from nsa.attention import nsa_attention
from nsa.config import Way
from tests.attention import equations
from tests.attention.space import Example, examples, tensors
from tests.attention.test_equations import bounded


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
