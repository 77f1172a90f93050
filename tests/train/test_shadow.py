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
from nsa.witness.shadow.optimizer import Shadow
from tests.train.engines import batch
from tests.train.shadowed import STEPS, TOKEN, engine, last_weight, problems, trained


@pytest.mark.parametrize("fused", ["0", "1"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_healthy_optimizer_agrees_with_its_shadow(fused: str, precision: str) -> None:
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
    made.optimizer = switched(made.optimizer, made.model, made.plan.config.train, fused=False)
    assert problems(trained(made, first=5, last=8), first=5) == []


def _rate_stays(made: Engine) -> None:
    made.optimizer.register_step_pre_hook(lambda optimizer, *_: _put_rate(optimizer, 3e-3))


def _put_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _not_clipped(made: Engine) -> None:
    def clip() -> Tensor:
        return torch.nn.utils.get_total_norm(
            [p.grad for p in made.model.parameters() if p.grad is not None]
        )

    made.clip = clip  # type: ignore[method-assign]


def _half_frozen(made: Engine) -> None:
    def freeze(*_: object) -> None:
        for name, parameter in made.model.named_parameters():
            if "gate_up" in name and parameter.grad is not None:
                quarter = parameter.shape[0] // 4
                parameter.grad[:quarter] = 0
                parameter.grad[2 * quarter : 3 * quarter] = 0

    made.optimizer.register_step_pre_hook(freeze)


def _bf16_weights(made: Engine) -> None:
    def narrow(*_: object) -> None:
        for parameter in made.model.parameters():
            if parameter.dim() >= 2:
                parameter.data.copy_(parameter.data.bfloat16())

    made.optimizer.register_step_post_hook(narrow)


def _between_steps(made: Engine) -> None:
    """The weights are worn down before each forward pass, out of the update's sight."""

    def wear(*_: object) -> None:
        made.model.head.weight.data.mul_(0.999)

    made.model.register_forward_pre_hook(wear)


def _a_row_between_steps(made: Engine) -> None:
    """None of the drawn elements is in it."""
    weight = last_weight(made)

    def wear(*_: object) -> None:
        weight.data[5].mul_(0.999)

    made.model.register_forward_pre_hook(wear)


def _another_epsilon(made: Engine) -> None:
    made.optimizer.param_groups[0]["eps"] = 1e-4


def _other_formula(made: Engine) -> None:
    made.optimizer.param_groups[0]["amsgrad"] = True


def _a_row_put_back(made: Engine) -> None:
    """No update for the 128th part of a parameter, in which hardly ever a drawn element lies."""
    update = made.update
    weight = made.model.layers[0].get_parameter("mlp.down.weight")

    def but_for_a_row(*args: Any) -> float:
        kept = weight.detach()[17].clone()
        rate = update(*args)
        weight.data[17] = kept
        return rate

    made.update = but_for_a_row  # type: ignore[method-assign]


def _no_decay(made: Engine) -> None:
    made.optimizer.param_groups[0]["weight_decay"] = 0.0


# Where nothing else is wrong, the row says what is left to look at.
LEFT = " (norm, moments and told rate are right: left are which parameters decay"


# Each by one of both kinds of update, which a healthy run shows to be alike.
@pytest.mark.parametrize(
    ("plant", "fused", "says"),
    [
        (_rate_stays, "0", "learning rate: off by"),
        (_not_clipped, "1", "first moment: off by"),
        (_half_frozen, "0", "first moment: off by"),
        (_bf16_weights, "0", "weights after the update: off by"),
        (_between_steps, "1", "change between two steps"),
        (_a_row_between_steps, "0", "change between two steps"),
        (_another_epsilon, "0", f"allowed 32{LEFT}"),
        (_a_row_put_back, "0", "what changes weights right after the update"),
        (_other_formula, "0", "a formula other than AdamW's"),
        (_no_decay, "1", f"allowed 32{LEFT}"),
    ],
)
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
