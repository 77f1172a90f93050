"""A step's gradient computed a second time: the same beside a healthy step, another by a defect."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
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
from nsa.witness.shadow.recompute import Bias, Recomputed, branch_use
from runbook.accounts.optimizer import _bias_problems
from tests.accounts.launches import WORK
from tests.train.engines import batch
from tests.train.launching import free_port
from tests.train.shadowed import TOKEN, engine, problems, trained


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


def _cut(values: Tensor) -> Tensor:
    """To bf16 by leaving out the lower half of the digits."""
    return (values.view(torch.int32) & -65536).view(torch.float32)


def _down(values: Tensor) -> Tensor:
    cut = _cut(values)
    return torch.where(values < cut, torch.nextafter(cut.bfloat16(), -_INF), cut.bfloat16()).float()


_INF = torch.tensor(float("inf"), dtype=torch.bfloat16)
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": lambda values: values.bfloat16().float(),
    "cut": _cut,
    "down": _down,
}


@pytest.mark.parametrize(("way", "seen"), [("nearest", ""), ("cut", "towards 0"), ("down", "up")])
def test_the_way_gradients_are_rounded_is_seen(way: str, seen: str) -> None:
    generator = torch.Generator().manual_seed(1)
    own = 1e-4 * torch.randn(2, 600, generator=generator)
    again = Recomputed(
        loss=torch.zeros(()), gradient=own.double().mean(0), size=own.abs().double().mean(0),
        asked=[], scale=1.0, least=torch.finfo(torch.bfloat16).tiny, gates=own, apart=None,
    )  # fmt: skip
    reduced = (WAYS[way](own[0] / 2) + WAYS[way](own[1] / 2)).bfloat16().float()
    told = Bias().with_step(again, reduced).report()
    assert told["weight"] > 200
    work = replace(WORK, dtype="fp32", wire="bf16", device="cpu", nproc=2)
    found = list(_bias_problems(told, work))
    assert bool(found) is bool(seen), told
    assert not seen or seen in " ".join(found)


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


class _Unseen(torch.autograd.Function):
    """The loss as it is, with the gradient of something else added."""

    @staticmethod
    def forward(_ctx: Any, loss: Tensor, _other: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, gradient


def _decayed(made: Engine, loss: Tensor) -> Tensor:
    squares = sum((p.square().sum() for p in made.model.parameters()), torch.zeros(()))
    added: Tensor = _Unseen.apply(loss, 1e-3 * squares)  # type: ignore[no-untyped-call]
    return added


def _after(name: str, change: Callable[[Engine, Any], Any]) -> Callable[[Engine], None]:
    """What this method of the engine gives is what `change` makes of it."""

    def plant(made: Engine) -> None:
        own = getattr(made, name)
        setattr(made, name, lambda *given, **how: change(made, own(*given, **how)))

    return plant


def _act(change: Callable[[Engine], object]) -> Callable[[Engine, Any], Any]:
    """Something that is done beside what is given on."""

    def act(made: Engine, given: Any) -> Any:
        change(made)
        return given

    return act


def _in_proj(made: Engine) -> Tensor:
    weight: Tensor = made.model.layers[0].get_parameter("attention.in_proj.weight")
    return weight


def _slope(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _freeze_a_part(made: Engine) -> None:
    """A hook on a parameter, which runs wherever that parameter gets a gradient."""
    weight = _in_proj(made)
    rows = len(weight) // 7
    weight.register_hook(lambda g: torch.cat((torch.zeros_like(g[:rows]), g[rows:])))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "plant",
    [
        _after("loss", _decayed),
        _after("gradients", _act(lambda it: _slope(_in_proj(it))[-8:].mul_(1.01))),
        # The 256th part of a parameter, in which hardly ever one of the drawn elements lies.
        _after("gradients", _act(lambda it: _slope(it.model.embedding.weight)[17].zero_())),
        _freeze_a_part,
    ],
)
def test_a_gradient_of_something_else_than_the_loss_fails_the_account(
    plant: Callable[[Engine], None],
) -> None:
    made = engine()
    plant(made)
    (text,) = problems(trained(made))
    assert "the gradient before clipping is not that of the step's loss: off by" in text
