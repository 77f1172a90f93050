"""The shadow of the optimizer: silent beside a healthy one; what changes at rest is counted."""

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


# Where nothing else is wrong, the row says what is left to look at.
LEFT = " (norm, moments and told rate are right: left are which parameters decay"


@pytest.mark.parametrize(
    ("told", "says"),
    [({"eps": 1e-4}, f"allowed 32{LEFT}"), ({"amsgrad": True}, "a formula other than AdamW's")],
)
def test_another_update_than_adamws_fails_the_account(told: dict[str, Any], says: str) -> None:
    made = engine()
    made.optimizer.param_groups[0].update(told)
    assert any(says in text for text in problems(trained(made)))


def test_the_rate_of_every_step_is_held_against_the_schedule() -> None:
    """Also of those that nobody drew: that of one step in a hundred is seen, too."""
    made = engine()
    shadow = Shadow(made, token=TOKEN, first=1, last=STEPS)
    for step in range(1, 12):
        outcome = made.compute([batch(step, 32)])
        made.update(step)
        for group in made.optimizer.param_groups:
            group["lr"] = 0.0 if step == 7 else made.rate(step)
        shadow.updated(step, outcome.norm)
    assert shadow.report()["rate"] == 1.0


def _state(made: Engine, name: str = "exp_avg") -> Tensor:
    moment: Tensor = made.optimizer.state[last_weight(made)][name]
    return moment


def _leave_gradient(made: Engine) -> None:
    weight = last_weight(made)
    weight.grad = torch.zeros_like(weight)
    weight.grad[5, 7] = 1e-6


# What is changed, and the jumps that are counted; more than one where that is None.
Changes = dict[str, tuple[Callable[[Engine], object], int | None]]
AT_REST: Changes = {
    "nothing": (lambda it: None, 0),
    "mode": (lambda it: it.model.eval(), 1),
    "weights": (lambda it: [p.data.add_(1.0) for p in it.model.parameters()], None),
    # What none of the drawn elements meets.
    "a sign": (lambda it: last_weight(it).data[5, 7].neg_(), 1),
    "columns": (lambda it: last_weight(it).data.copy_(last_weight(it).flip(1)), 1),
    "two of a vector": (
        lambda it: it.model.norm.weight.data[:2].copy_(torch.tensor([1.5, 0.5])), 1),
    "of a second moment": (lambda it: _state(it, "exp_avg_sq")[5, 7].mul_(1.001), 1),
    "of a gradient": (_leave_gradient, 1),
}  # fmt: skip
BETWEEN_UPDATES: Changes = {
    "nothing": (lambda it: None, 0),
    # Of all weights, and of a window of them.
    "weights rounded": (lambda it: last_weight(it).data.copy_(last_weight(it).bfloat16()), 2),
    "columns of a moment": (lambda it: _state(it).copy_(_state(it).roll(1, 1)), 1),
    "a first moment": (lambda it: _state(it).mul_(0.5), 1),
    "a second moment": (lambda it: _state(it, "exp_avg_sq").mul_(0.5), 1),
    # The norm of the whole stays as it is, but for the order in which it is added up.
    "rows of weights": (lambda it: last_weight(it).data.copy_(last_weight(it).roll(1, 0)), None),
    "no moments left": (lambda it: it.optimizer.state.clear(), 1),
}


@pytest.mark.parametrize("what", AT_REST)
@pytest.mark.parametrize("later", [False, True], ids=("meanwhile", "before the next step"))
def test_what_changes_while_all_has_to_rest_is_counted(what: str, later: bool) -> None:
    (change, jumps), made = AT_REST[what], engine()
    made.compute([batch(5, 32)])
    made.update(1)
    shadow = Shadow(made, token=TOKEN, first=1, last=STEPS)
    with torch.no_grad():
        with shadow.rest.unchanged():
            _ = later or change(made)
        _ = later and change(made)
    shadow.watch(1)
    found = shadow.report()["jumps"]
    assert found > 1 if jumps is None else found == jumps


@pytest.mark.parametrize("what", BETWEEN_UPDATES)
@pytest.mark.parametrize("inside", [False, True], ids=("between steps", "before the update"))
def test_what_changes_between_two_updates_that_nobody_drew_is_seen(what: str, inside: bool) -> None:
    (change, jumps), made = BETWEEN_UPDATES[what], engine()
    shadow = Shadow(made, token=TOKEN, first=1, last=400)
    for step in range(1, 8):
        shadow.watch(step)
        outcome = made.compute([batch(step, 32)])
        made.update(step)
        shadow.updated(step, outcome.norm)
    assert shadow.report()["jumps"] == 0
    if inside:
        shadow.watch(8)
    with torch.no_grad():
        change(made)
    if not inside:
        shadow.watch(8)
    made.compute([batch(8, 32)])
    found = shadow.report()["jumps"]
    assert found in (1, 2) if jumps is None else found == jumps
