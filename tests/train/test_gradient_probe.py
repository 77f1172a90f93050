"""The pass over the first batch, the token meter and the movement see what they are there for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import layer as layer_module
from nsa.step.engine import Engine
from nsa.witness.gradient_probe import _row, probe_gradients
from nsa.witness.oracle_check import OracleCheck
from nsa.witness.witness import Movement, TokenMeter, batch_digest
from tests.train.engines import S, batch, engine

TOLERANCE = 1e-4


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


class _Weaker(torch.autograd.Function):
    """x, whose gradient comes back 5 % too small."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return 0.95 * grads[0]


@pytest.mark.parametrize(
    "part", ["q", "k_cmp", "k_sel", "k_win", "v_cmp", "v_sel", "v_win", "gates"]
)
def test_a_gradient_that_is_5_percent_too_small_shows_in_the_slope(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = layer_module.split_projection

    def weakened(*args: Any) -> Any:
        parts = split(*args)
        return replace(parts, **{part: _Weaker.apply(getattr(parts, part))})  # type: ignore[no-untyped-call]

    monkeypatch.setattr(layer_module, "split_projection", weakened)
    spots = probe_gradients(engine(), batch())["oracle"]
    assert spots["slope"] > 1e-3 and spots["layer"] < TOLERANCE


def test_a_loss_that_counts_half_shows_in_the_pass_which_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, trainer = Engine.loss, engine()
    monkeypatch.setattr(Engine, "loss", lambda self, tokens: 0.5 * real(self, tokens))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    proof = probe_gradients(trainer, batch())
    assert abs(proof["logit_gradient"] - 0.5) < 1e-3
    for parameter, weight in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(parameter, weight) and parameter.grad is None
        assert not parameter._backward_hooks
    assert not trainer.optimizer.state


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
