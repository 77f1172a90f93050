"""Every path against the equations, over a generated space; packed rows too."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa.attention import attend, nsa_attention
from nsa.attention.branches import Branches
from nsa.attention.cpu import pieces
from nsa.config import NSAConfig, Phi, Way
from nsa.contract import NSAError
from nsa.witness.self_test import Bound, measure, random_inputs
from tests.factory.tables import table
from tests.tiers import examples as by_tier

CPU, F64, BF16 = torch.device("cpu"), torch.float64, torch.bfloat16
# Rounding only; of a row of few numbers, whose sums may cancel, more of it.
EXACT = Bound(whole=1e-12, row=1e-10, scores=1e-12)


def bounded(max_examples: int) -> settings:
    """The same examples every time, and only so many, of which the fast tier takes fewer."""
    return settings(
        by_tier(max_examples),
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


@st.composite
def shapes(draw: st.DrawFn) -> NSAConfig:
    """Any allowed combination, small or large."""
    d, groups = draw(st.sampled_from((1, 2, 3, 4, 8, 16))), draw(st.sampled_from((1, 2, 3)))
    return NSAConfig(
        dim=8, n_heads=groups * draw(st.sampled_from((1, 2, 6, 16))), n_kv_groups=groups,
        d_k=draw(st.sampled_from((1, 3, 8))), d_v=draw(st.sampled_from((1, 4, 5))),
        l=d * draw(st.sampled_from((1, 2, 3))), d=d, l_sel=d * draw(st.sampled_from((1, 2, 4))),
        n_sel=draw(st.sampled_from((3, 4, 7, 40))), w=draw(st.sampled_from((1, 2, 17, 64, 400))),
        phi=draw(st.sampled_from(get_args(Phi))),
    )  # fmt: skip


def run(x: Branches, cfg: NSAConfig, path: str) -> tuple[Tensor, Tensor]:
    """One path of the package; "pieces": batched, with work cut as only long sequences are."""
    if path == "pieces":
        with patch.multiple(pieces, MIN_TOKENS=3, PIECE_BYTES=1):
            return attend(x, cfg, Way(path="batched"))
    name, _, version = path.partition(" ")
    way = Way(force_sdpa=True) if name == "sdpa" else Way(path=name)
    return attend(x, cfg, replace(way, selection_ranges=version or "v2"))


@pytest.mark.parametrize(
    ("path", "dtype", "longest", "number"),
    [
        *((path, F64, 300, 40) for path in ("batched v1", "batched", "pieces")),
        ("sdpa", F64, 300, 40),
        ("sequential", F64, 48, 30),
        *((path, torch.float32, 160, 12) for path in ("batched", "pieces")),
        *((path, BF16, 64, 12) for path in ("batched", "sdpa")),
    ],
    ids=str,
)
def test_outputs_gradients_and_blocks(
    path: str, dtype: torch.dtype, longest: int, number: int
) -> None:
    @bounded(number)
    @given(cfg=shapes(), seq_len=st.integers(1, longest))
    def over_space(cfg: NSAConfig, seq_len: int) -> None:
        found = measure(lambda x: run(x, cfg, path), cfg, seq_len, dtype=dtype, device=CPU)
        bound = EXACT if dtype == F64 else found.bound
        assert replace(found, bound=bound).problems == []

    over_space()


@pytest.mark.parametrize("path", ["batched", "sequential"])
@bounded(20)
@given(cfg=shapes(), lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4))
def test_each_sequence_is_alone(path: str, cfg: NSAConfig, lengths: list[int]) -> None:
    """Lengths of any kind, also below one compressed block: such a sequence has no such key."""
    parts = [
        random_inputs(cfg, length, dtype=F64, device=CPU, seed=number)[0].named()
        for number, length in enumerate(lengths)
    ]
    wanted = torch.cat([run(Branches(**part), cfg, path)[0] for part in parts], 1)
    x = {n: torch.cat([part[n] for part in parts], 1).requires_grad_() for n in parts[0]}
    begins = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for cu_seqlens in (begins, torch.tensor(begins, dtype=torch.int32)):
        out = nsa_attention(Branches(**x), cfg, way=Way(path=path), cu_seqlens=cu_seqlens)
        torch.testing.assert_close(out.detach(), wanted, rtol=0, atol=1e-12)
    # Nothing of the last sequence reaches the others, backward either.
    others = out[:, : begins[-2]].sum() + 0 * out.sum()
    for name, gradient in zip(x, torch.autograd.grad(others, list(x.values())), strict=True):
        rows = parts[-1][name].shape[1]
        assert not gradient[:, gradient.shape[1] - rows :].any(), name


@table(__file__, "no_packings")
def test_what_is_no_packing(batch: int, cu_seqlens: list[int], told: str) -> None:
    cfg = NSAConfig(dim=8, n_heads=2, n_kv_groups=1, d_k=4, d_v=4)
    q = torch.zeros(batch, 6, 2, 4)
    kv = torch.zeros(batch, 6, 1, 4)
    keys = {name: kv for name in Branches.__annotations__ if name[:2] in ("k_", "v_")}
    x = Branches(q=q, **keys, gates=torch.ones(batch, 6, 2, 3))
    with pytest.raises(NSAError, match=told):
        nsa_attention(x, cfg, cu_seqlens=cu_seqlens)
