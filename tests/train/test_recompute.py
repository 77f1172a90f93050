"""A step's gradient computed a second time: the same beside a healthy step, another by a defect."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.attention.tracing import count_ranges, is_watched
from nsa.data.source import Batch
from nsa.projection import _Split
from nsa.step.engine import Engine
from nsa.witness.shadow import Shadow
from nsa.witness.shadow.recompute import branch_use
from tests.train.engines import batch
from tests.train.launching import free_port
from tests.train.shadowed import TOKEN, engine, trained


@pytest.mark.parametrize("words", [[], ["--precision", "fp16", "--accum", "2"]])
def test_what_is_computed_twice_is_the_same(words: list[str]) -> None:
    told = trained(engine(*words), last=10)["recomputed"]
    assert len(told["steps"]) >= 2
    assert told["gradient"] < 1e-6
    assert told["losses"] == pytest.approx([told["own_losses"][n] for n in told["steps"]], abs=1e-5)


@pytest.mark.parametrize("words", [["--accum", "2"], ["--precision", "bf16"]])
def test_the_gates_of_a_step_are_those_of_the_same_computed_again(words: list[str]) -> None:
    made = engine(*words)
    with torch.no_grad():
        made.model.layers[1].attention.gate_bias[::3] = 40.0  # the others are not 0: no collapse
    told = trained(made, last=10)["recomputed"]
    for step, layers in zip(told["steps"], told["gates"], strict=True):
        again = torch.tensor(layers, dtype=torch.float64)
        assert torch.allclose(again, told["own_gates"][step][:, :5], rtol=0, atol=1e-7)
        assert again[1, 2] > again[0, 2] + 0.05  # layers differ, and so do branches


def test_a_layer_of_each_step_that_is_computed_twice_is_held_against_the_equations() -> None:
    made = engine()
    told = trained(made, last=10)["recomputed"]
    assert [*told["layers"]] == told["steps"][1:] and len(told["layers"]) >= 1
    assert {*told["slopes"]} <= {*told["layers"]} and len(told["slopes"]) >= 1
    assert max(told["layers"].values()) < 2e-5 and max(told["slopes"].values()) < 1.6e-4
    for one in made.model.attentions():
        one.cfg = replace(one.cfg, w=8)
    assert min(trained(made, last=10)["recomputed"]["layers"].values()) > 1e-3
    half = trained(engine("--precision", "bf16"), last=10)["recomputed"]
    assert half["layers"] == half["slopes"] == {}


@pytest.mark.parametrize("value", [0.0, 1e-30, 1.0])
def test_gates_of_0_are_a_use_of_no_branch(value: float) -> None:
    use = branch_use(torch.tensor([[value, 0.0, 0.0]]))
    assert torch.allclose(use, torch.tensor([0.0, *[float(value == 1)] * 2, 0.0, 0.0]).double())


class Rounded:
    """In the place of a recording: a replay that rounds as no pass from the host does."""

    def __init__(self, made: Engine) -> None:
        self._layers = made.model.layers

    def __call__(self, x: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled() or is_watched([]):
            return None
        for layer in self._layers:
            x = layer(x).bfloat16().float()
        return x


@pytest.mark.parametrize("from_host", [True, False])
def test_what_a_step_runs_from_the_host_is_computed_again_from_there(from_host: bool) -> None:
    """The first step counts, so that none of its passes is replayed; without a word, two are."""
    made = engine("--accum", "3")
    made.model.recording = Rounded(made)
    shadow = Shadow(made, token=TOKEN, first=1, last=1)
    batches = [batch(seed, 32) for seed in (1, 2, 3)]
    passes = len(batches) if from_host else 0
    shadow.recompute(1, batches, from_host=passes)
    shadow.watch(1)
    made.model.run_from_host(passes)
    outcome = made.compute(batches, count_ranges())
    made.update(1)
    shadow.updated(1, outcome.norm)
    gap = shadow.report_recomputed()["gradient"]
    assert gap < 1e-6 if from_host else gap > 1e-4


def test_a_model_too_large_for_one_time_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.witness.shadow.recompute._MOST_ELEMENTS", 40_000)
    made = engine()
    shadow, asked = Shadow(made, token=TOKEN, first=1, last=80), []
    for step in sorted(shadow.recomputed):
        shadow.recompute(step, [Batch(tokens=torch.zeros(1, 33, dtype=torch.int64))])
        asked.append(shadow._again[step].asked)
    assert not any(all(found) for found in asked) and all(any(found) for found in asked)
    assert len(set(map(tuple, asked))) > 1
    assert all(p.grad is None for p in made.model.parameters())


def _one_of_two(rank: int, port: int) -> list[dict[str, Any]]:
    """What a rank tells of two steps; from the second on, rank 1 halves the gates' gradient."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    made = engine("--ddp", "1", **os.environ)
    healthy, backward = trained(made, last=1)["recomputed"], _Split.backward
    if rank == 1:
        _Split.backward = staticmethod(  # type: ignore[method-assign]
            lambda ctx, *grads: backward(ctx, *grads[:-1], grads[-1] * 0.5)
        )
    wrong = trained(made, first=2, last=2)["recomputed"]
    made.ranks.end()
    return [healthy, wrong]


def test_a_rank_that_is_wrong_in_its_backward_pass_differs_from_the_others() -> None:
    """It agrees with itself: only the same micro-batch on all ranks tells."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        port = free_port()
        told = pool.starmap_async(_one_of_two, [(rank, port) for rank in range(2)]).get(300)
    for healthy, wrong in told:
        assert healthy["ranks"] < 1e-6 and healthy["gradient"] < 1e-6
        assert wrong["ranks"] == pytest.approx(1 / 3, rel=0.01) and wrong["gradient"] < 1e-6
    assert told[0][0]["losses"] == told[1][0]["losses"]
