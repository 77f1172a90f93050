"""The pass over the first batch, the token meter and the movement see what they are there for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import layer as layers
from nsa.model import NSALanguageModel
from nsa.step.engine import Engine
from nsa.witness.accounts import Movement, TokenMeter, batch_digest
from nsa.witness.gradient_probe import _row, probe_gradients
from nsa.witness.oracle_check import OracleCheck
from tests.train.engines import S, batch, engine

TOLERANCE = 1e-4


def test_an_honest_trainer_proves_itself_and_nothing_is_left_behind() -> None:
    trainer = engine()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    proof = probe_gradients(trainer, batch())
    loss = float(trainer.loss(batch().tokens).detach())  # that of the first step
    assert proof["loss"] == pytest.approx(loss, abs=1e-6)
    assert proof["loss_again"] == pytest.approx(loss, abs=1e-5)
    assert proof["positions"] == 2 * S
    assert proof["wire"] == "fp32"
    assert proof["missing"] == []
    assert proof["logit_gradient"] < 1e-5
    assert [proof["mean_low"], proof["mean_high"]] == pytest.approx([1, 1], abs=1e-6)
    assert proof["norm_told"] == pytest.approx(proof["norm_before"], rel=1e-4)
    assert proof["norm_after"] == pytest.approx(1.0, rel=1e-4)
    assert all(value > 0 for value in proof["own_gradient"].values())
    spots = proof["oracle"]
    assert spots["embedding"] == 0
    assert max(spots[name] for name in ("attention", "gates", "layer", "logits")) < TOLERANCE
    assert spots["slope"] < 2e-5
    assert spots["blocks_illegal"] == 0
    assert (spots["layers"], spots["seams"]) == (2, 0)
    assert all(p.grad is None for p in trainer.model.parameters())
    assert all(torch.equal(p, b) for p, b in zip(trainer.model.parameters(), before, strict=True))
    assert not trainer.optimizer.state
    assert not any(p._backward_hooks for p in trainer.model.parameters())


def test_what_a_micro_batch_leaves_is_seen_as_the_next_one_finds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = engine("--accum", "2", "--batch-size", "4")
    assert probe_gradients(trainer, batch())["kept"] == 0
    assert probe_gradients(engine(), batch())["kept"] is None
    real = Engine.loss

    def rounded(self: Engine, tokens: Tensor, *, wrapped: bool = True) -> Tensor:
        for one in self.model.parameters():
            one.grad = one.grad if one.grad is None else one.grad.bfloat16().float()
        return real(self, tokens, wrapped=wrapped)

    monkeypatch.setattr(Engine, "loss", rounded)
    assert probe_gradients(trainer, batch())["kept"] > 1e-4


def _oracle(
    where: str, beyond: float = 0.0313, alone: str = ""
) -> Callable[[dict[str, Any]], bool]:
    """By default more than bf16 explains, so that it is noticed in every precision.

    alone: what is right all the same.
    """
    return lambda proof: (
        proof["oracle"][where] > beyond and (not alone or proof["oracle"][alone] < TOLERANCE)
    )


def _gates_for_statistics_alone(real: Any) -> Any:
    def forward(self: layers.NSAAttention, x: Tensor) -> Tensor:
        out: Tensor = real(self, x)
        assert self.last_gates is not None
        self.last_gates = self.last_gates.roll(1, -1)
        return out

    return forward


class _SlopeTimes(torch.autograd.Function):
    """x, whose gradient comes back as another multiple of itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.by * grads[0], None


def _times(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: _SlopeTimes.apply(x, by)  # type: ignore[no-any-return, no-untyped-call]


def _between(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """What a layer gives is changed after all else has looked at it."""

    def plant(real: Any) -> Any:
        def forward(self: NSALanguageModel, tokens: Tensor) -> Tensor:
            hooks = [x.register_forward_hook(lambda _m, _i, out: change(out)) for x in self.layers]
            out: Tensor = real(self, tokens)
            for hook in hooks:
                hook.remove()
            return out

        return forward

    return plant


def _part(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """A part of the projection changed on its way into attention."""

    def plant(real: Any) -> Any:
        def changed(*args: Any) -> Any:
            parts = real(*args)
            return replace(parts, **{name: change(getattr(parts, name))})

        return changed

    return plant


ATTENTION = (layers.NSAAttention, "forward")
PARTS = (layers, "split_projection")
MODEL = (NSALanguageModel, "forward")
LOSS = (Engine, "loss")
# What is replaced, by what, and where the pass over the first batch has to show it.
WRONG: dict[str, tuple[tuple[Any, str], Callable[[Any], Any], Callable[[dict[str, Any]], bool]]] = {
    "attention that reads nothing": (
        ATTENTION,
        lambda real: lambda self, x: 0 * real(self, x),
        _oracle("attention"),
    ),
    "gates kept for statistics alone": (
        ATTENTION,
        _gates_for_statistics_alone,
        _oracle("gates", 0.01, "attention"),
    ),
    **{
        name: (
            MODEL,
            _between(change),
            lambda it: it["oracle"]["seams"] == 2 and it["oracle"]["layer"] < TOLERANCE,
        )
        for name, change in (
            ("what a layer gives is not what the next one gets", lambda x: x * 0.5),
            ("a gradient weakened on its way between layers", _times(0.9)),
        )
    },
    **{
        f"a gradient of {part} that is 5 % too small": (
            PARTS,
            _part(part, _times(0.95)),
            _oracle("slope", 1e-3, "layer"),
        )
        for part in ("q", "k_cmp", "k_sel", "k_win", "v_cmp", "v_sel", "v_win", "gates")
    },
    "a gradient of a norm that is doubled": (
        (torch.nn.RMSNorm, "forward"),
        lambda real: lambda self, x: real(self, _times(2.0)(x)),
        _oracle("slope", 1e-2),
    ),
    "logits that are halved": (
        MODEL,
        lambda real: lambda self, x: real(self, x) * 0.5,
        _oracle("logits", 0.4),
    ),
    "loss of half of each sequence": (
        LOSS,
        lambda real: lambda self, tokens: real(self, tokens[:, : S // 2 + 1]),
        lambda proof: proof["positions"] == S,
    ),
    "loss that counts half": (
        LOSS,
        lambda real: lambda self, tokens: real(self, tokens) * 0.5,
        lambda proof: (
            abs(proof["logit_gradient"] - 0.5) < 1e-3 and proof["loss_again"] > proof["loss"] + 1
        ),
    ),
    "nothing is clipped": (
        (Engine, "clip"),
        lambda _real: lambda self: torch.tensor(1.0),
        lambda proof: (
            proof["norm_told"] == 1.0 and proof["norm_after"] == proof["norm_before"] > 10
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_shows_in_the_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (owner, attribute), plant, shows = WRONG[name]
    monkeypatch.setattr(owner, attribute, plant(getattr(owner, attribute)))
    proof = probe_gradients(engine(), batch())
    assert shows(proof), proof


def test_no_layer_is_safe_from_the_oracle() -> None:
    trainer = engine("--set", "model.n_layers=3")
    middle = trainer.model.layers[1]
    middle.attention.rope_base = 10.0  # type: ignore[assignment, union-attr]
    spots = probe_gradients(trainer, batch())["oracle"]
    assert spots["layers"] == 3 and spots["attention"] > 100 * TOLERANCE


def test_each_launch_looks_elsewhere_and_no_position_is_safe() -> None:
    seen = {
        tuple(OracleCheck(model=engine().model, seed=seed)._positions(S).tolist())
        for seed in range(60)
    }
    places = {place for positions in seen for place in positions}
    assert len(seen) == 60 and len(places) > 100
    assert all(positions[0] == 0 and positions[-1] == S - 1 for positions in seen)


def test_no_row_of_a_batch_is_safe_from_the_oracle() -> None:
    """Over launches one rank alone looks at every row, and ranks of one launch look at others."""
    trainer, seen = engine(), set()
    for launch in range(60):
        trainer.plan = replace(trainer.plan, run_token=f"{launch:032x}")
        rows = []
        for rank in range(4):
            trainer.ranks = replace(trainer.ranks, place=replace(trainer.ranks.place, rank=rank))
            rows.append(_row(trainer, 4))
        assert sorted(rows) == [0, 1, 2, 3]
        seen.add(rows[0])
    assert seen == {0, 1, 2, 3}


def test_a_micro_batch_that_is_lost_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients dropped before the last one: half of the known numbers arrives."""
    trainer = engine("--accum", "2")
    assert probe_gradients(trainer, batch())["mean_high"] == pytest.approx(1.0, abs=1e-6)
    real, calls = Engine.loss, []

    def forgetful(self: Engine, tokens: Tensor) -> Tensor:
        calls.append(1)
        self.optimizer.zero_grad(set_to_none=False)
        return real(self, tokens)

    monkeypatch.setattr(Engine, "loss", forgetful)
    assert probe_gradients(trainer, batch())["mean_high"] == pytest.approx(0.5, abs=1e-6)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("kind", "wire"),
    [
        (torch.float8_e4m3fn, "8 bits or fewer"),
        (torch.bfloat16, "bf16"),
        (torch.float16, "fp16"),
        (torch.float32, "fp32"),
    ],
)
def test_the_digits_betray_the_type(
    kind: torch.dtype, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = engine()
    real = Engine.gradients

    def narrow(self: Engine, *args: Any, **options: Any) -> Tensor:
        loss = real(self, *args, **options)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            scale = parameter.grad.abs().max() / 448 if kind.itemsize == 1 else 1.0
            parameter.grad = (parameter.grad / scale).to(kind).float() * scale
        return loss

    monkeypatch.setattr(Engine, "gradients", narrow)
    assert probe_gradients(trainer, batch())["wire"] == wire


def test_a_frozen_parameter_gets_no_gradient() -> None:
    trainer = engine()
    trainer.model.norm.weight.requires_grad_(False)
    assert probe_gradients(trainer, batch())["missing"] == ["norm.weight"]


def test_movement_names_the_group_whose_worst_layer_stood_still() -> None:
    trainer = engine()
    movement = Movement(trainer.model)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if name != "layers.1.mlp.down.weight":
                parameter.add_(0.25)
    moved = movement.by_group()
    assert moved.pop("mlp.down") == 0
    assert list(moved.values()) == pytest.approx([0.25] * len(moved), abs=1e-6)


def test_the_meter_counts_what_enters_the_embedding_in_a_step_only() -> None:
    trainer, tokens = engine(), batch()
    meter = TokenMeter(trainer.model)
    trainer.loss(tokens.tokens)  # before the first step: primed, proven
    meter.begin([tokens])
    trainer.loss(tokens.tokens)
    with torch.no_grad():
        trainer.model(tokens.tokens[:, :-1])
    said = meter.take()
    assert said["embedded"] == 2 * S
    assert said["data"] == f"{batch_digest(tokens.tokens):016x}"
    sums = meter.sums()
    assert sums["fetched_sum"] == sums["embedded_sum"] == int(tokens.tokens[:, :-1].sum())
    meter.begin([tokens])
    trainer.loss(batch(6).tokens)
    assert meter.sums()["fetched_sum"] != meter.sums()["embedded_sum"]
