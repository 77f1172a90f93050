"""The optimizer's shadow: silent beside a healthy one; a planted defect fails the account."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.step.engine import Engine
from nsa.step.optimizer import is_fused, switched
from nsa.witness.accounts import updates
from nsa.witness.shadow import Shadow
from tests.train.engines import batch
from tests.train.shadowed import STEPS, TOKEN, engine, last_weight, problems, trained


@pytest.mark.parametrize(("precision", "fused"), [("fp32", "1"), ("bf16", "0"), ("fp16", "1")])
def test_a_healthy_optimizer_agrees_with_its_shadow(precision: str, fused: str) -> None:
    made = engine("--precision", precision, NSA_OPT_FUSED=fused)
    assert is_fused(made.optimizer) is (fused == "1")
    told = trained(made)
    assert problems(told) == []
    assert 0 < max(told[name] for name in ("weight", "first_moment", "second_moment")) < 16


def test_a_step_that_the_scaler_leaves_out_moves_nothing() -> None:
    made = engine("--precision", "fp16", NSA_SCALER_INIT_SCALE="1e30")
    told = trained(made, last=2)
    assert updates(made.optimizer) == [0, 0]
    assert problems(told, last=2) == []


def test_a_run_that_goes_on_begins_with_the_state_that_it_has() -> None:
    made = engine(NSA_OPT_FUSED="1")
    trained(made, last=4)
    assert updates(made.optimizer) == [4, 4]
    made.optimizer = switched(made.optimizer, made.model, made.plan.config.train, fused=False)
    assert problems(trained(made, first=5, last=8), first=5) == []


def _hooked(hook: str, change: Callable[[Engine], object]) -> Callable[[Engine], None]:
    """Done by this hook of the optimizer."""

    def plant(made: Engine) -> None:
        def act(*_: object) -> None:
            change(made)

        getattr(made.optimizer, f"register_{hook}")(act)

    return plant


def _put_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _not_clipped(made: Engine) -> None:
    made.clip = lambda: torch.nn.utils.get_total_norm(  # type: ignore[method-assign]
        [p.grad for p in made.model.parameters() if p.grad is not None]
    )


def _half_frozen(made: Engine) -> None:
    for layer in (0, 1):
        gate, up = made.model.layers[layer].get_parameter("mlp.gate_up.weight").grad.chunk(2)
        for half in (gate, up):
            half[: len(half) // 2] = 0


def _narrow(made: Engine) -> None:
    for parameter in made.model.parameters():
        if parameter.dim() >= 2:
            parameter.data.copy_(parameter.data.bfloat16())


def _worn(part: Callable[[Engine], Tensor]) -> Callable[[Engine], None]:
    """Weights are worn down before each forward pass, out of the update's sight."""

    def plant(made: Engine) -> None:
        worn = part(made)

        def wear(*_: object) -> None:
            worn.mul_(0.999)

        made.model.register_forward_pre_hook(wear)

    return plant


def _a_row_put_back(made: Engine) -> None:
    """No update for the 128th part of a parameter, in which hardly ever a drawn element lies."""
    update, weight = made.update, made.model.layers[0].get_parameter("mlp.down.weight")

    def but_for_a_row(*args: Any) -> float:
        kept = weight.detach()[17].clone()
        rate = update(*args)
        weight.data[17] = kept
        return rate

    made.update = but_for_a_row  # type: ignore[method-assign]


def _told(**options: Any) -> Callable[[Engine], None]:
    return lambda made: made.optimizer.param_groups[0].update(options)


# Where nothing else is wrong, the row says what is left to look at.
LEFT = " (norm, moments and told rate are right: left are which parameters decay"


# Each by one of both kinds of update, which a healthy run shows to be alike.
@pytest.mark.parametrize(
    ("plant", "fused", "says"),
    [
        (_hooked("step_pre_hook", lambda made: _put_rate(made.optimizer, 3e-3)), "0",
         "learning rate: off by"),
        (_not_clipped, "1", "first moment: off by"),
        (_hooked("step_pre_hook", _half_frozen), "0", "first moment: off by"),
        (_hooked("step_post_hook", _narrow), "0", "weights after the update: off by"),
        # Of a row, too, that nobody drew.
        (_worn(lambda made: made.model.head.weight.data), "1", "change between two steps"),
        (_worn(lambda made: last_weight(made).data[5]), "0", "change between two steps"),
        (_told(eps=1e-4), "0", f"allowed 32{LEFT}"),
        (_a_row_put_back, "0", "what changes weights right after the update"),
        (_told(amsgrad=True), "0", "a formula other than AdamW's"),
        (_told(weight_decay=0.0), "1", f"allowed 32{LEFT}"),
    ],
)  # fmt: skip
def test_a_planted_defect_fails_the_account(
    plant: Callable[[Engine], None], fused: str, says: str
) -> None:
    made = engine(NSA_OPT_FUSED=fused)
    plant(made)
    assert any(says in text for text in problems(trained(made)))


def test_the_rate_of_every_step_is_held_against_the_schedule() -> None:
    """Also of those that nobody drew: that of one step in a hundred is seen, too."""
    made = engine()
    shadow = Shadow(made, token=TOKEN, first=1, last=STEPS)
    for step in range(1, 12):
        outcome = made.compute([batch(step, 32)])
        made.update(step)
        _put_rate(made.optimizer, 0.0 if step == 7 else made.rate(step))
        shadow.updated(step, outcome.norm)
    assert shadow.report()["rate"] == 1.0
