"""All query heads of a kv group read the same blocks, chosen by their summed importance.

Of blocks that are equally important, the first ones are read.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from nsa.attention import attend, nsa_attention
from nsa.attention.branches import Branches
from nsa.config import NSAConfig, Way
from nsa.tests import maths

SEQ_LEN = 61


@cache
def _attended(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [S, S, H, Dv] of a path for S equal rows, and the selected values of each."""
    cfg = NSAConfig(**maths.SMALL)
    x = maths.random_inputs(maths.SMALL, 1, SEQ_LEN, seed=3, dtype=torch.float64)
    rows = {n: v.detach().repeat_interleave(SEQ_LEN, 0).requires_grad_() for n, v in x.items()}
    return nsa_attention(Branches(**rows), cfg, Way(path=path)), rows["v_sel"]


@cache
def _touched(path: str, head: int) -> torch.Tensor:
    """Which selected keys [S queries, S keys, G] one head's output depends on.

    Query t is asked in row t, so that one backward pass answers for all of them.
    """
    out, values = _attended(path)
    asked = out[:, :, head].diagonal().sum()
    (grad,) = torch.autograd.grad(asked, values, retain_graph=True)
    return (grad.abs().sum(-1) > 0).cpu()


@pytest.mark.parametrize("path", ("sequential", "batched"))
def test_heads_of_a_group_read_the_same_tokens(path: str) -> None:
    """Those of the blocks that the path says it has selected, up to the query."""
    cfg = NSAConfig(**maths.SMALL)
    x = maths.random_inputs(maths.SMALL, 1, SEQ_LEN, seed=3, dtype=torch.float64)
    blocks = attend(Branches(**x), cfg, Way(path=path))[1][0].cpu()
    share = cfg.heads_per_group
    for group in range(cfg.n_kv_groups):
        first = _touched(path, group * share)
        others = [g for g in range(cfg.n_kv_groups) if g != group]
        assert not first[..., others].any(), "the head reads another group's keys"
        for head in range(group * share + 1, (group + 1) * share):
            assert torch.equal(_touched(path, head), first), f"head {head} reads other tokens"
        for t, read in enumerate(first[..., group]):
            chosen = {i // cfg.l_sel for i in range(SEQ_LEN) if bool(read[i])}
            assert chosen == {int(j) for j in blocks[t, group] if j >= 0}, f"query {t}"
            assert not read[t + 1 :].any(), f"query {t} reads the future"


# Each position sees 16 compressed blocks, so that equal shares of the attention are exact: then
# all blocks but the forced ones tie, whatever the order of the sums.
TIED = tuple(range(67, 71))


@pytest.mark.parametrize("path", ("sequential", "batched"))
def test_of_equal_scores_the_lower_blocks_are_read(path: str) -> None:
    """Compressed keys of zero attract every query alike."""
    shape = {**maths.SMALL, "n_sel": 6}
    cfg = NSAConfig(**shape)
    x = maths.random_inputs(shape, 1, TIED[-1] + 1, seed=3, dtype=torch.float32)
    with torch.no_grad():
        x["k_cmp"].zero_()
    out, blocks = attend(Branches(**x), cfg, Way(path=path))
    chosen = blocks[0, :, 0].tolist()
    for t in TIED:
        (grad,) = torch.autograd.grad(out[0, t, 0].sum(), x["v_sel"], retain_graph=True)
        tokens = grad[0, :, 0].abs().sum(-1).nonzero().flatten().tolist()
        current = t // cfg.l_sel
        wanted = [*range(cfg.n_sel - 2), current - 1, current]
        assert sorted({i // cfg.l_sel for i in tokens}) == wanted, f"{path}: query {t}"
        assert chosen[t] == wanted, f"{path} says otherwise: query {t}"
