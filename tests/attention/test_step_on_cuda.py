"""The step on a CUDA device, proven without one: operator calls, memory, host waits, precision."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from benchmarks.step_calls import Cost, measure
from nsa.config import ModelConfig, NSAConfig, Way
from nsa.data import Batch
from nsa.launch.plan import plan_launch
from nsa.launch.ranks import Ranks
from nsa.model import NSALanguageModel
from nsa.step.engine import Engine
from nsa.step.numbers import Arriving, post
from tests.attention.fake_cuda import Watched, fake_cuda, walk_back

PRODUCTION = Path(__file__).parents[2] / "configs/m7c_125m_2xa100_production.yaml"
MODEL = ModelConfig(vocab_size=256, n_layers=12)
TINY = NSAConfig(dim=16, n_heads=4, n_kv_groups=2, d_k=6, d_v=6, l=6, d=3, l_sel=6, n_sel=3, w=7)


@cache
def cost(*, dense: bool = False) -> Cost:
    """One micro-batch of one rank of the production run, from two layers and one more of them."""
    two, three = (measure(replace(MODEL, n_layers=n), 2048, dense=dense) for n in (2, 3))
    rest = MODEL.n_layers - 2
    calls = {name: count + rest * (three.calls[name] - count) for name, count in two.calls.items()}
    peak = two.peak_bytes + rest * (three.peak_bytes - two.peak_bytes)
    return Cost(calls=calls, peak_bytes=peak)


def test_walking_back_is_what_the_engine_does() -> None:
    """The same operators, as often, and the same gradients, bit by bit."""
    torch.manual_seed(0)
    model = NSALanguageModel(ModelConfig(vocab_size=11, n_layers=2, attention=TINY))
    model.attend_by(Way(force_sdpa=True))
    tokens, found = torch.randint(11, (2, 40)), []
    model(tokens)  # makes the rotations, which are kept
    for backward in (Tensor.backward, walk_back):
        model.zero_grad()
        with Watched() as watched:
            backward(model(tokens).square().mean())
        found.append((watched.calls, [p.grad.clone() for p in model.parameters()]))
    (engine, theirs), (walk, mine) = found
    assert walk == engine and engine.total() > 300
    assert all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True))


def test_a_micro_batch_is_few_operator_calls() -> None:
    found = cost()
    assert found.total <= 2400
    # A build without CUDA takes fused operators apart; then the figure would be another.
    assert found.calls["_fused_rms_norm"] == 2 * MODEL.n_layers + 1
    by_sdpa = sum(count for name, count in found.calls.items() if "_scaled_dot_product" in name)
    # Two branches, forward and backward.
    assert by_sdpa == 4 * MODEL.n_layers


def test_memory_is_near_that_of_dense_attention() -> None:
    assert cost().peak_bytes <= 1.3 * cost(dense=True).peak_bytes


def production(*words: str, **toggles: str) -> Engine:
    """The engine of rank 0 of the production run, without a process group.

    Recomputation is off, as under DDP.
    """
    config = ["--config", str(PRODUCTION), "--set", "runtime.gradient_checkpointing=false"]
    given = {"NSA_PREFILL_BATCHED": "1", "NSA_OPT_FUSED": "1", **toggles}
    two = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    plan = plan_launch([*config, *words], {**two, **given})
    return Engine(plan, Ranks(place=plan.place, device=torch.device("cuda", 0), grouped=False))


def fake_production(n_layers: int) -> Engine:
    """Of so many layers.

    Weights are made where they stay, because fake ones cannot be moved.
    """
    with torch.device("cuda", 0), patch.object(NSALanguageModel, "to", lambda self, _: self):
        engine = production("--set", f"model.n_layers={n_layers}")
        engine.configure(engine.plan.toggles)
    return engine


def step(engine: Engine, number: int) -> None:
    """Two micro-batches, clipping, the collective's start, fused AdamW, and the statistics."""
    plan = engine.plan
    shape = (plan.per_rank_batch, plan.config.train.seq_len + 1)
    batches = [Batch(tokens=torch.zeros(shape, dtype=torch.int64)) for _ in range(2)]
    outcome = engine.compute(batches)
    # Events are the driver's; nothing of them waits.
    with patch("torch.cuda.Event", MagicMock()):
        # Every log_every steps; what reads them waits for them, not for the steps after.
        Arriving(engine.model.gate_numbers())
        post(
            engine.ranks,
            loss=outcome.loss,
            norm=outcome.norm,
            strict_norm=True,
            halt=False,
            terminate=False,
            saved=False,
        )
    engine.update(number)


def calls_without_a_wait(n_layers: int) -> int:
    """A fake tensor raises where a number is read; copies that wait are counted."""
    with fake_cuda(), Watched() as watched:
        engine = fake_production(n_layers)
        for number in (1, 2):
            watched.waits.clear()
            watched.calls.clear()
            step(engine, number)
            assert watched.waits == []
        assert watched.calls["_fused_adamw_"] == 2
        return watched.total


def test_the_whole_step_never_waits(precision: None) -> None:
    one, two = (calls_without_a_wait(n) for n in (1, 2))
    assert one + (MODEL.n_layers - 1) * (two - one) <= 2 * 2400 + 700


def test_a_wait_would_be_seen(precision: None) -> None:
    """Made to fail on purpose: a number that is read, and a copy in either direction."""
    with fake_cuda(), Watched() as watched:
        x = torch.ones(3, device="cuda")
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
        x.to("cpu", non_blocking=True)
        assert watched.waits == []
        x.to("cpu")
        torch.zeros(3).to("cuda:0")
        torch.zeros(3).to("cuda:0", non_blocking=True)
        assert watched.waits == ["aten::_to_copy"] * 3
        torch.zeros(3).pin_memory().to("cuda:0", non_blocking=True)
        assert len(watched.waits) == 3
