"""Slopes of the equations agree with a healthy layer's gradients, whatever the way and length."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from nsa.config import ModelConfig, NSAConfig, Path, Phi, Way
from nsa.model import NSALanguageModel
from nsa.witness.oracle_check import OracleCheck
from nsa.witness.slope_check import slope_error

SHAPE = NSAConfig(
    dim=64, n_heads=4, n_kv_groups=2, d_k=16, d_v=16, l=16, d=8, l_sel=16, n_sel=4, w=32
)


@pytest.mark.parametrize("path", ["batched", "sequential", "reference"])
@pytest.mark.parametrize("phi", ["avg", "mlp"])
# Without a compressed block, with one alone (whose key gets no gradient), with choices.
@pytest.mark.parametrize("seq_len", [10, 20, 130])
def test_a_healthy_layer_is_right(path: Path, phi: Phi, seq_len: int) -> None:
    torch.manual_seed(seq_len)
    attention = replace(SHAPE, phi=phi)
    cfg = ModelConfig(vocab_size=64, n_layers=2, attention=attention, way=Way(path=path))
    layer = NSALanguageModel(cfg).layers[1]
    at = np.unique(np.linspace(0, seq_len - 1, 6).astype(np.int64))
    x = torch.randn(1, seq_len, 64)
    kept = layer.attention.last_gates
    error = slope_error(layer, cfg, x, at, within=nullcontext, seed=3)  # type: ignore[arg-type]
    assert error < 2e-5
    assert layer.attention.last_gates is kept
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("bias", [0.0, 1e-20, 1e-8, 1e-3])
def test_a_bias_that_has_hardly_moved_is_no_error(bias: float) -> None:
    """A share of it would be nothing beside the rounding of a difference."""
    torch.manual_seed(1)
    cfg = ModelConfig(vocab_size=64, n_layers=1, attention=SHAPE)
    layer = NSALanguageModel(cfg).layers[0]
    layer.attention.gate_bias.data.normal_(std=bias)  # type: ignore[union-attr]
    x, at = torch.randn(1, 64, 64), np.array([0, 20, 63])
    error = slope_error(layer, cfg, x, at, within=nullcontext, seed=2)  # type: ignore[arg-type]
    assert error < 2e-5


def test_a_large_residual_stream_rounds_no_healthy_layer_wrong() -> None:
    torch.manual_seed(1)
    cfg = ModelConfig(vocab_size=64, n_layers=1, attention=SHAPE)
    model = NSALanguageModel(cfg)
    model.embedding.weight.data.mul_(1e5)
    check = OracleCheck(model=model, only=0)
    with check.watch():
        model(torch.randint(0, 64, (1, 64)))
    off = check.step_errors(values=True, slope=True)
    assert off["seams"] == 0
    assert max(off["layers"], off["logits"]) < 2e-5 and off["slopes"] < 1.6e-4


@pytest.mark.parametrize(("cast", "seams"), [("norm", 1), ("head", 0)])
@pytest.mark.parametrize("words", [64, 1000])
def test_a_type_of_fewer_digits_between_or_behind_the_layers_is_seen(
    cast: str, seams: int, words: int
) -> None:
    torch.manual_seed(2)
    model = NSALanguageModel(ModelConfig(vocab_size=words, n_layers=2, attention=SHAPE))
    check = OracleCheck(model=model, only=1, seed=5)
    model.get_submodule(cast).register_forward_pre_hook(lambda _, x: x[0].bfloat16().float())
    with torch.no_grad(), check.watch():
        model(torch.randint(0, words, (2, 64)))
    off = check.step_errors(values=True, slope=False)
    assert off["layers"] < 2e-5 and off["logits"] > 1e-3
    # In half types this alone has a bound.
    assert check.step_errors(values=False, slope=False) == {"seams": seams}
