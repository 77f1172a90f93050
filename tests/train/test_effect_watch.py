"""What a block's first step shows: kernels by the operators that ran, and where it is counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.launch.arms import Block
from nsa.model import whole
from nsa.witness.effect_watch import BlockEvidence, kernel_name, operators_by_branch
from nsa.witness.profiling import torch_profiler
from tests.train.engines import batch, engine


@pytest.mark.parametrize(
    ("ops", "kernel"),
    [
        (["aten::_scaled_dot_product_flash_attention_for_cpu"], "flash"),
        (["aten::_scaled_dot_product_flash_attention"], "flash"),
        (["aten::_scaled_dot_product_efficient_attention"], "efficient"),
        (["aten::_scaled_dot_product_cudnn_attention"], "cudnn"),
        (["aten::_scaled_dot_product_attention_math", "aten::_softmax"], "math"),
        (["aten::_softmax"], "explicit_softmax"),
        (["aten::exp_"], "explicit_softmax"),
        (["nsa::core"], "triton"),
        (["aten::_scaled_dot_product_attention_math", "nsa::core"], "math+triton"),
        ([], "none"),
    ],
)
def test_kernels_are_named_by_their_operators(ops: list[str], kernel: str) -> None:
    assert kernel_name(Counter(ops)) == kernel


def test_operators_outside_a_branch_are_not_counted() -> None:
    x = torch.randn(1, 1, 4, 8)
    with torch_profiler("cpu") as profiler:
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        with torch.profiler.record_function("nsa.win"):
            x.softmax(-1)
    ops = operators_by_branch(profiler.function_events)
    assert kernel_name(ops["win"]) == "explicit_softmax"
    assert kernel_name(ops["sel"]) == "none"


def test_what_graphs_run_is_counted_in_a_pass_of_its_own() -> None:
    """The modules run there, and the step's own pass is compiled, as in all other steps."""
    made, ran = engine("--set", "train.seq_len=32"), []

    def noting(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        ran.append(given)
        return whole(*given)

    def evidence() -> BlockEvidence:
        block = Block(index=0, arm="", warmup_steps=0, steps=5, toggles=made.plan.toggles)
        log: Any = None
        return BlockEvidence(block, log=log, engine=made, profiler=None, running={})

    rows = batch(1, 32)
    plain = evidence()
    assert not plain.look_apart(rows)
    with plain.watch():
        made.loss(rows.tokens, wrapped=False)
    plain.step_done()
    assert plain._ranges.entered
    made.model.compiled = noting
    apart = evidence()
    assert apart.look_apart(rows) and not apart.look_apart(rows)
    assert apart._ranges.entered == plain._ranges.entered and not ran
    with apart.watch():
        made.loss(rows.tokens, wrapped=False)
    assert len(ran) == made.plan.config.model.n_layers and apart._layer_calls == 1
    apart.step_done()
    assert not made.model.layers[0]._forward_pre_hooks
