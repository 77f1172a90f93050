"""The optimizer's shadow: silent beside a healthy one; a planted defect fails the account."""

from __future__ import annotations

from typing import Any

import pytest

from nsa.step.optimizer import is_fused, switched
from nsa.witness.accounts import updates
from nsa.witness.shadow import Shadow
from tests.train.engines import batch
from tests.train.shadowed import STEPS, TOKEN, engine, problems, trained


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
