"""Layers as CUDA graphs: what may be replayed, how a wrong replay is found, and real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from nsa.attention.tracing import OperatorCount
from nsa.config import Way
from nsa.data import Batch
from nsa.model import NSALanguageModel, mean_loss
from nsa.rounding import Gap
from nsa.step.compiled import backward_nodes
from nsa.step.cuda_graphs import REPLAYED_NODE, Recording, replay_gap, roundings
from nsa.step.engine import Engine
from tests.attention.test_step_on_cuda import production
from tests.step.small import SHAPE, model_of

TOKENS = (2, 40)


def as_they_are(
    modules: tuple[nn.Module, ...], inputs: tuple[tuple[Tensor], ...], *, num_warmup_iters: int
) -> tuple[nn.Module, ...]:
    """In the place of torch's recorder, where there is no CUDA: its rehearsals, then no recording.

    Like it, outputs are differentiated by the input and by all parameters, where it is called.
    """
    assert num_warmup_iters > 0
    for module, (x,) in zip(modules, inputs, strict=True):
        outputs = [out for out in module(x) if out.requires_grad]
        wanted = [x, *module.parameters()]
        torch.autograd.grad(outputs, wanted, [torch.empty_like(out) for out in outputs])
    return modules


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> NSALanguageModel:
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", as_they_are)
    found = model_of()
    found.recording = Recording(found, TOKENS, nullcontext)
    return found


def recording_of(model: NSALanguageModel) -> Recording:
    assert isinstance(model.recording, Recording)
    return model.recording


def test_records_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass in bf16 without kept casts, the backward pass outside of autocast."""
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", as_they_are)
    found, kept = model_of(), []
    found.attend_by(Way(force_sdpa=True))

    def autocast() -> torch.autocast:
        kept.append(torch.is_autocast_cache_enabled())
        return torch.autocast("cpu", dtype=torch.bfloat16)

    recording = Recording(found, TOKENS, autocast)
    assert kept == [True, False, False]
    assert torch.is_autocast_cache_enabled()
    x = torch.zeros(*TOKENS, SHAPE.dim)
    assert not recording.fits(x)
    with autocast():
        assert recording.fits(x)


class TestWhatMayBeReplayed:
    @pytest.mark.parametrize(
        ("shape", "kind", "within", "fits"),
        [
            ((2, 40, 16), torch.float32, nullcontext(), True),
            ((1, 40, 16), torch.float32, nullcontext(), False),
            ((2, 40, 16), torch.bfloat16, nullcontext(), False),
            ((2, 40, 16), torch.float32, torch.autocast("cpu", dtype=torch.bfloat16), False),
        ],
    )
    def test_a_plain_pass_of_the_recorded_shape(
        self, model: NSALanguageModel, shape: tuple[int, ...], kind: torch.dtype, within: Any,
        fits: bool,
    ) -> None:  # fmt: skip
        with within:
            assert recording_of(model).fits(torch.zeros(shape, dtype=kind)) is fits

    def test_only_training_and_its_gates_are_kept(self, model: NSALanguageModel) -> None:
        ran: list[int] = []
        replay, tokens = recording_of(model), torch.randint(11, TOKENS)
        model.recording = lambda x: ran.append(1) or replay(x)
        model(tokens)
        replayed = model.gate_numbers()
        model.eval()(tokens)
        assert ran == [1]
        assert torch.equal(model.gate_numbers(), replayed)


def _stale(module: nn.Module) -> Callable[[Tensor], Any]:
    """A replay that reads the memory of an earlier pass."""
    kept: list[Tensor] = []

    def replay(x: Tensor) -> Any:
        kept.append(x.detach())
        return module(x + (kept[max(0, len(kept) - 2)] - x).detach())

    return replay


def scaled(module: Callable[..., Any], factor: float = 1.01) -> Callable[..., Any]:
    """Right values, and gradients that are too large, or no numbers."""

    def replay(*given: Any) -> Any:
        out, *rest = module(*given)
        out.register_hook(lambda grad: grad * factor)
        return (out, *rest)

    return replay


class TestTheComparison:
    def gap(self, model: NSALanguageModel) -> Gap:
        def loss(tokens: Tensor) -> Tensor:
            return mean_loss(model(tokens[:, :-1]), tokens[:, 1:])

        one = torch.randint(11, (1, 41))
        rounding = roundings(model, loss, loss, one)
        assert set(rounding.values()) == {0.0}
        # A loss is one number, near the right one by chance: no less than what its type rounds by.
        assert roundings(model, loss, loss, one, torch.bfloat16) == rounding | {"loss": 2**-8}
        return replay_gap(model, loss, loss, TOKENS)

    def test_the_same_is_no_gap(self, model: NSALanguageModel) -> None:
        assert self.gap(model).error == 0.0
        assert all(p.grad is None for p in model.parameters())

    @pytest.mark.parametrize(
        ("place", "spoiled"),
        [(0, _stale), (-1, scaled), (-1, partial(scaled, factor=float("nan")))],
        ids=["yesterday's input", "wrong gradients", "no numbers"],
    )
    def test_a_wrong_replay_is_seen(
        self, model: NSALanguageModel, place: int, spoiled: Callable[[nn.Module], Any]
    ) -> None:
        recording = recording_of(model)
        replayed = list(recording._replayed)
        replayed[place] = spoiled(replayed[place])
        recording._replayed = tuple(replayed)
        found = self.gap(model)
        assert found.too_wide and "off by" in str(found)


@pytest.mark.parametrize("keep", [True, False])
def test_the_first_gradients_are_copied_out_of_the_memory_of_a_replay(keep: bool) -> None:
    """A second replay writes where they lie: the sum must not notice. All by one launch."""
    pools = [torch.zeros(3), torch.zeros(2)]

    class Replayed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: float, *weights: Tensor) -> Tensor:
            ctx.value = value
            return torch.stack([w.sum() for w in weights]).sum()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            # Other tensors over the same memory each time, as a replay gives: autograd keeps them.
            return None, *(torch.empty(0).set_(pool.fill_(ctx.value)) for pool in pools)

    model: Any = nn.Module()
    model.layers = nn.ParameterList([nn.Parameter(torch.ones(pool.shape)) for pool in pools])
    model.recording = keep or None
    # The micro-batches of a step, without what they are made of.
    engine: Any = SimpleNamespace(
        model=model,
        device=torch.device("cpu"),
        wrapped=SimpleNamespace(gradient_scope=lambda last: nullcontext()),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        on_loss=None,
        loss=lambda tokens: Replayed.apply(float(tokens) * 3, *model.layers),
    )
    with OperatorCount() as count:
        Engine.gradients(engine, [Batch(tokens=torch.tensor(n)) for n in (1, 2, 4)])
    found = [w.grad.tolist() for w in model.layers]
    copies = {n: c for n, c in count.names.items() if n in ("clone", "_foreach_copy_")}
    assert (found == [[21.0] * 3, [21.0] * 2]) is keep, "made to fail on purpose"
    assert copies == ({"_foreach_copy_": 1} if keep else {})


def test_no_gradient_is_added_by_a_node_of_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be added on the recording's stream, and one from before cannot be recorded."""
    recorded: list[object] = []

    def keeps(modules: tuple[nn.Module, ...], *rest: Any, **more: Any) -> tuple[nn.Module, ...]:
        recorded.extend(nodes_of(modules))
        return as_they_are(modules, *rest, **more)

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", keeps)
    model = model_of()
    weights = {name: p.data_ptr() for name, p in model.named_parameters()}
    before = nodes_of(model.layers)
    Recording(model, TOKENS, nullcontext)
    after = nodes_of(model.layers)
    assert len(before) == len(recorded) == len(after) == len(set(before + recorded + after)) / 3
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == weights
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def nodes_of(modules: Iterable[nn.Module]) -> list[object]:
    """What adds to the gradient of each parameter."""
    return [get_gradient_edge(p).node for module in modules for p in module.parameters()]


# torch itself: its compiler uses what it deprecates, and looks for gradients where none are kept.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.gpu
class TestOnADevice:
    """The production layers, three steps of two micro-batches."""

    def trained(self, **toggles: str) -> tuple[list[float], dict[str, Tensor], Engine]:
        engine = production("--set", "train.warmup_steps=1", **toggles)
        engine.dispatch.barred.clear()
        engine.configure(engine.plan.toggles)
        generator = torch.Generator().manual_seed(7)
        losses = []
        for step in range(1, 4):
            batches = [
                Batch(tokens=torch.randint(256, (1, 2049), generator=generator)) for _ in range(2)
            ]
            losses.append(float(engine.compute(batches).loss))
            engine.update(step)
        weights = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
        return losses, weights, engine

    @pytest.mark.parametrize("mode", ["off", "layer"])
    def test_trains_the_same(self, mode: str) -> None:
        """Both micro-batches count, and each step reads the weights that the last one left."""
        losses, weights, _ = self.trained(NSA_COMPILE=mode)
        replayed, others, engine = self.trained(NSA_COMPILE=mode, NSA_CUDA_GRAPHS="1")
        assert engine.replay_gap is not None and not engine.replay_gap.too_wide
        assert replayed == pytest.approx(losses, rel=2e-3)
        assert losses[0] != pytest.approx(losses[2], rel=1e-4), "nothing was trained"
        for name, weight in weights.items():
            moved = float((others[name] - weight).abs().max())
            # Three steps of Adam move an element by at most three times the rate.
            assert moved <= 2 * 3 * engine.plan.config.train.lr, name

    def test_the_host_launches_a_layer_as_one(self) -> None:
        _, _, engine = self.trained(NSA_CUDA_GRAPHS="1")
        tokens = torch.randint(256, (1, 2049), device="cuda")
        loss = engine.loss(tokens, wrapped=False)
        assert backward_nodes(loss)[REPLAYED_NODE] == engine.plan.config.model.n_layers
