"""Kernels named by the operators that ran."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from nsa.witness.effect_watch import kernel_name, operators_by_branch
from nsa.witness.profiling import torch_profiler


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
        (["nsa::selected"], "triton"),
        ([], "none"),
    ],
)
def test_kernels_are_named_by_their_operators(ops: list[str], kernel: str) -> None:
    assert kernel_name(Counter(ops)) == kernel


def test_two_kernels_in_one_branch_are_both_named() -> None:
    ops = ["aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_attention_math"]
    assert kernel_name(Counter(ops)) == "flash+math"


def test_operators_outside_a_branch_are_not_counted() -> None:
    x = torch.randn(1, 1, 4, 8)
    with torch_profiler("cpu") as profiler:
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        with torch.profiler.record_function("nsa.win"):
            x.softmax(-1)
    ops = operators_by_branch(profiler.function_events)
    assert kernel_name(ops["win"]) == "explicit_softmax"
    assert kernel_name(ops["sel"]) == "none"
