"""All query heads of a kv group read the same blocks, chosen by their summed importance."""

from __future__ import annotations

import pytest
import torch

import nsa
from nsa.attention import nsa_attention, select_blocks
from nsa.tests import maths

SEQ_LEN = 61


def _touched(path: str, head: int) -> torch.Tensor:
    """Which selected keys [S queries, S keys, G] one head's output depends on."""
    cfg = nsa.NSAConfig(**maths.SMALL)
    x = maths.random_inputs(maths.SMALL, 1, SEQ_LEN, seed=3, dtype=torch.float64)
    out = nsa_attention(**x, cfg=cfg, path=path)
    rows = []
    for t in range(SEQ_LEN):
        (grad,) = torch.autograd.grad(out[0, t, head].sum(), x["v_sel"], retain_graph=True)
        rows.append(grad[0].abs().sum(-1) > 0)
    return torch.stack(rows).cpu()


@pytest.mark.parametrize("path", ("reference", "sequential", "batched"))
def test_heads_of_a_group_read_the_same_tokens(path: str) -> None:
    share = maths.SMALL["n_heads"] // maths.SMALL["n_kv_groups"]
    for group in range(maths.SMALL["n_kv_groups"]):
        first = _touched(path, group * share)
        assert first[..., group].any(), "the head reads nothing at all"
        others = [g for g in range(maths.SMALL["n_kv_groups"]) if g != group]
        assert not first[..., others].any(), "the head reads another group's keys"
        for head in range(group * share + 1, (group + 1) * share):
            assert torch.equal(_touched(path, head), first), f"head {head} reads other tokens"


@pytest.mark.parametrize("path", ("reference", "sequential", "batched"))
def test_tokens_read_are_those_of_the_selected_blocks(path: str) -> None:
    cfg = nsa.NSAConfig(**maths.SMALL)
    x = maths.random_inputs(maths.SMALL, 1, SEQ_LEN, seed=3, dtype=torch.float64)
    blocks = select_blocks(x["q"], x["k_cmp"], cfg)[0].cpu()
    for group in range(cfg.n_kv_groups):
        read = _touched(path, group * cfg.heads_per_group)[..., group]
        for t in range(SEQ_LEN):
            chosen = {i // cfg.l_sel for i in range(SEQ_LEN) if bool(read[t, i])}
            assert chosen == {int(j) for j in blocks[t, group] if j >= 0}, f"query {t}"
            assert not read[t, t + 1 :].any(), f"query {t} reads the future"


def test_groups_choose_for_themselves() -> None:
    """Made to fail on purpose: were the sum taken over all heads, groups would always agree."""
    cfg = nsa.NSAConfig(**maths.SMALL)
    x = maths.random_inputs(maths.SMALL, 1, SEQ_LEN, seed=3, dtype=torch.float64)
    blocks = select_blocks(x["q"], x["k_cmp"], cfg)[0]
    assert not torch.equal(blocks[:, 0], blocks[:, 1])
