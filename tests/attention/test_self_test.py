"""The test that a trainer runs on its device, here on a CPU, and the judge of blocks by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.attention import attend, sdpa, selection
from nsa.attention.branches import Branches
from nsa.config import NSAConfig, Way
from nsa.witness.equations import judge
from nsa.witness.self_test import Agreement, measure
from tests.factory.tables import table

CPU = torch.device("cpu")
SMALL = NSAConfig(
    dim=48, n_heads=6, n_kv_groups=2, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=24
)


def held(
    cfg: NSAConfig = SMALL,
    seq_len: int = 131,
    *,
    dtype: torch.dtype = torch.bfloat16,
    given: NSAConfig | None = None,
    run: Callable[..., tuple[Tensor, Tensor]] = attend,
    **more: Any,
) -> Agreement:
    """A path measured; `given`: the path runs another config than the equations."""
    call = partial(run, cfg=given or cfg, way=Way(force_sdpa=True, **more))
    return measure(call, cfg, seq_len, dtype=dtype, device=CPU)


@pytest.mark.parametrize("seq_len", [3, 24, 32])
def test_masked_sdpa_agrees_in_float16(seq_len: int) -> None:
    """In other types every path does, in `test_proofs_on_device`."""
    found = held(seq_len=seq_len, dtype=torch.float16)
    assert found.problems == [] and max(found.whole.values()) > 0, "rounding must show"


def _spoiled(name: str, factor: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """A path whose gradient of one input alone is wrong."""

    def run(x: Branches, **given: object) -> tuple[Tensor, Tensor]:
        named = x.named()
        spoiled = named[name].view_as(named[name])
        spoiled.register_hook(lambda grad: grad * factor)
        return attend(Branches(**{**named, name: spoiled}), **given)

    return run


@pytest.mark.parametrize("name", [one.name for one in fields(Branches)])
def test_a_wrong_gradient_is_rejected(name: str) -> None:
    """2 % is twice what five roundings to bfloat16 explain; 1 without a gradient at all."""
    for factor in (1.02, 0.0):
        found = held(run=_spoiled(name, factor))
        assert found.problems and all(text.startswith(f"{name} ") for text in found.problems)


def given_on(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[str]:
    """The problems where the path gives on what is made of its output and its blocks."""
    return held(run=lambda x, **given: change(*attend(x, **given))).problems


def test_one_wrong_row_is_rejected() -> None:
    """A head of one token, of 786: too little for the tensor as a whole, too much for itself."""
    factor = torch.ones(1, 131, 6, 1)
    factor[0, 130, 5] = 1.2
    found = [text for text in given_on(lambda out, blocks: (out * factor, blocks))
             if text.startswith("out is off")]  # fmt: skip
    assert found and all("in one row" in text for text in found)


def test_not_a_number_is_rejected() -> None:
    assert len(given_on(lambda out, blocks: (out * float("nan"), blocks))) >= 18


def _worse(blocks: Tensor) -> Tensor:
    """The free block of the last query: the first one that is not chosen."""
    spare = next(j for j in range(1, 15) if j not in blocks[0, -1, 0].tolist())
    changed = blocks.clone()
    changed[0, -1, 0, 1] = spare
    return changed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda blocks: blocks.masked_fill(blocks == 0, -1), "break the rules"),
        (_worse, "was left out that scores"),
    ],
)
def test_other_blocks_are_rejected(change: Callable[[Tensor], Tensor], said: str) -> None:
    """A choice that breaks the rules, and one that takes a worse block than it leaves."""
    assert any(said in text for text in given_on(lambda out, blocks: (out, change(blocks))))


def test_scores_without_all_of_float32_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed keys rounded to the 10 bits of TF32 choose a block that scores less."""

    def rounded(x: Tensor, cfg: NSAConfig) -> Tensor:
        exact = selection.compress(x, cfg)
        bits = exact.detach().contiguous().view(torch.int32)
        return exact + (((bits + 0x1000) & ~0x1FFF).view(torch.float32) - exact.detach())

    one_group = NSAConfig(n_heads=6, n_kv_groups=1)
    monkeypatch.setattr(sdpa, "compress", rounded)
    assert any("was left out that scores" in text for text in held(one_group, 2048).problems)


@pytest.mark.parametrize(
    "error", [RuntimeError("no kernel\nimage"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_a_kernel_that_refuses_is_an_answer_and_a_lack_of_memory_is_raised(
    error: RuntimeError,
) -> None:
    def refuses(*_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        raise error

    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            held(run=refuses)
        return
    found = held(run=refuses)
    assert found.refused == "no kernel image"
    assert found.problems == [f"it could not run: {found.refused}"]


# Position 59 of blocks of 10 sees blocks 0 to 5; forced are 0, 4 and 5, two more are free.
TINY = NSAConfig(dim=8, n_heads=2, n_kv_groups=1, d_k=4, d_v=4, l=10, d=5, l_sel=10, n_sel=5)
SCORES = torch.tensor([9.0, 2.0, 1.0, 3.0, 0.0, 0.0])


@table(__file__, "selections")
def test_a_selection_is_judged(blocks: list[int], illegal: int, shortfall: float) -> None:
    found, _, gaps = judge(torch.tensor([blocks]), SCORES[None], torch.tensor([59]), TINY)
    assert (found, gaps.item()) == (illegal, shortfall)
