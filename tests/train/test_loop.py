"""The loop of a launch in this process, and what watches beside its steps."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa.config import ModelConfig, NSAConfig, Way
from nsa.contract.digests import drawn_batch
from nsa.launch.asked import Block
from nsa.model import NSALanguageModel, whole
from nsa.step.dispatch import is_out_of_memory
from nsa.train.settle import evaluate
from nsa.witness.effect_watch import BlockEvidence, kernel_name
from nsa.witness.oracle_check import OracleCheck, slope_error
from nsa.witness.shadow.recompute import loss_again
from tests.factory.tables import table
from tests.train.engines import batch, engine


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (ValueError("out of memory"), False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_errors(error: Exception, memory: bool) -> None:
    assert is_out_of_memory(error) is memory


HELD_OUT = [batch(seed).tokens for seed in (1, 2, 3)]


def test_an_evaluation_is_the_mean_of_its_batches_and_leaves_nothing_behind() -> None:
    trainer = engine()
    loss, losses, kept = evaluate(trainer, HELD_OUT, drawn=1)
    assert len(losses) == 3
    assert loss == pytest.approx(math.fsum(losses) / 3, rel=1e-12)
    assert kept is HELD_OUT[1]
    assert loss_again(trainer, HELD_OUT[1]) == pytest.approx(losses[1], abs=1e-6)
    assert trainer.model.training
    assert all(p.grad is None for p in trainer.model.parameters())


def test_a_batch_that_is_never_reached_is_not_computed_again() -> None:
    assert evaluate(engine(), HELD_OUT[:2], drawn=2)[2] is None


def test_the_drawn_batch_differs_by_token_rank_and_step() -> None:
    drawn = [drawn_batch("a", 0, 1, 64), drawn_batch("b", 0, 1, 64), drawn_batch("a", 1, 1, 64)]
    drawn += [drawn_batch("a", 0, step, 64) for step in range(2, 30)]
    assert len(set(drawn)) > 15 and set(drawn) <= set(range(64))


SHAPE = NSAConfig(
    dim=64, n_heads=4, n_kv_groups=2, d_k=16, d_v=16, l=16, d=8, l_sel=16, n_sel=4, w=32
)


@pytest.mark.parametrize("path", ["batched", "sequential"])
@pytest.mark.parametrize("phi", ["avg", "mlp"])
# With one compressed block alone (whose key gets no gradient), with choices.
@pytest.mark.parametrize("seq_len", [20, 130])
def test_a_healthy_layer_is_right(path: Any, phi: Any, seq_len: int) -> None:
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


@pytest.mark.parametrize("bias", [0.0, 1e-20, 1e-3])
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


@table(__file__, "kernels")
def test_kernels_are_named_by_their_operators(ops: list[str], kernel: str) -> None:
    assert kernel_name(Counter(ops)) == kernel


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
    assert plain._seen.ranges.entered
    made.model.compiled = noting
    apart = evidence()
    assert apart.look_apart(rows) and not apart.look_apart(rows)
    assert apart._seen.ranges.entered == plain._seen.ranges.entered and not ran
    with apart.watch():
        made.loss(rows.tokens, wrapped=False)
    assert len(ran) == made.plan.config.model.n_layers and apart._seen.layer_calls == 1
    apart.step_done()
    assert not made.model.layers[0]._forward_pre_hooks
