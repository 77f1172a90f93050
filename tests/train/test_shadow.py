"""The optimizer's shadow: silent beside a healthy one; a planted defect fails the account."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.data.source import Batch
from nsa.train.clock import StepClock
from nsa.train.engine import Engine
from nsa.train.launch import plan_launch
from nsa.train.ranks import choose_device, start_ranks
from nsa.train.shadow import Shadow
from runbook.read.shadow_account import shadow_account
from tests.read.launches import WORK, changed, ending_of, honest
from tests.train.launching import SMOKE

TOKEN, STEPS = "ab" * 16, 8
SHORT = ["--set", "train.seq_len=32", "--set", "train.warmup_steps=3"]


def engine(*args: str, **toggles: str) -> Engine:
    argv = ["--config", str(SMOKE), "--ddp", "0", "--steps", str(STEPS), *SHORT, *args]
    plan = plan_launch(argv, {"NSA_PREFILL_BATCHED": "1", **toggles})
    made = Engine(plan, start_ranks(plan, choose_device(plan)))
    made.configure(plan.toggles)
    return made


def trained(made: Engine, first: int = 1, last: int = STEPS) -> dict[str, Any]:
    """What the shadow of these steps tells."""
    shadow, clock = Shadow(made, token=TOKEN, first=first, last=last), StepClock(made.device)
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 256, (2, 33), generator=generator)
        shadow.watch(step)
        outcome = made.compute([Batch(tokens=tokens)], clock)
        made.update(step, clock)
        shadow.updated(step, outcome.norm)
    return shadow.told()


def problems(told: dict[str, Any], first: int = 1, last: int = STEPS) -> list[str]:
    """What the account says about it."""
    (rank,) = changed(honest()[1][:1], 0, first_step=first, tokens=frozenset({TOKEN}))
    assert rank.steps is not None
    rank = replace(rank, steps=rank.steps[rank.steps["step"].between(first, last)])
    return shadow_account(ending_of((rank,), 0, shadow=told), replace(WORK, steps=last))


@pytest.mark.parametrize("fused", ["0", "1"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_healthy_optimizer_agrees_with_its_shadow(fused: str, precision: str) -> None:
    made = engine("--precision", precision, NSA_OPT_FUSED=fused)
    assert made.is_fused() is (fused == "1")
    told = trained(made)
    assert problems(told) == []
    assert 0 < max(told[name] for name in ("weight", "first_moment", "second_moment")) < 16


def test_one_parameter_after_the_other_agrees_too() -> None:
    made = engine()
    for group in made.optimizer.param_groups:
        group["foreach"] = False
    assert problems(trained(made)) == []


def test_a_step_that_the_scaler_leaves_out_moves_nothing() -> None:
    made = engine("--precision", "fp16", NSA_SCALER_INIT_SCALE="1e30")
    told = trained(made, last=2)
    assert made.updates() == [0, 0]
    assert problems(told, last=2) == []


def test_a_run_that_goes_on_begins_with_the_state_that_it_has() -> None:
    made = engine(NSA_OPT_FUSED="1")
    trained(made, last=4)
    made._switch_optimizer(fused=False)
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


def _momentum_reset(made: Engine) -> None:
    def reset(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for entry in optimizer.state.values():
            if entry["step"] % 2 == 1:
                entry["exp_avg"].zero_()

    made.optimizer.register_step_pre_hook(reset)


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


def _another_epsilon(made: Engine) -> None:
    made.optimizer.param_groups[0]["eps"] = 1e-4


def _no_decay(made: Engine) -> None:
    made.optimizer.param_groups[0]["weight_decay"] = 0.0


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (_rate_stays, "learning rate: off by"),
        (_not_clipped, "first moment: off by"),
        (_half_frozen, "first moment: off by"),
        (_momentum_reset, "first moment: off by"),
        (_bf16_weights, "weights after the update: off by"),
        (_between_steps, "change between two steps"),
        (_another_epsilon, "weights after the update: off by"),
        (_no_decay, "weights after the update: off by"),
    ],
)
@pytest.mark.parametrize("fused", ["0", "1"])
def test_a_planted_defect_fails_the_account(
    plant: Callable[[Engine], None], says: str, fused: str
) -> None:
    made = engine(NSA_OPT_FUSED=fused)
    plant(made)
    assert any(says in text for text in problems(trained(made)))


def test_a_rate_that_is_told_right_and_used_wrong_is_seen() -> None:
    made = engine()
    step = made.optimizer.step

    def slower(*args: Any) -> Any:
        rates = [group["lr"] for group in made.optimizer.param_groups]
        _put_rate(made.optimizer, rates[0] * 0.99)
        step(*args)
        _put_rate(made.optimizer, rates[0])

    made.optimizer.step = slower  # type: ignore[method-assign]
    (text,) = problems(trained(made))
    assert "weights after the update: off by" in text
