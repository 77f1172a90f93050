"""What changes where all has to rest, around evaluations and between two updates, is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nsa.step.engine import Engine
from nsa.train.evaluation import evaluate
from nsa.witness.accounts import TokenMeter
from nsa.witness.shadow.optimizer import Shadow
from tests.train.engines import batch
from tests.train.shadowed import STEPS, TOKEN, engine, last_weight


def _leave_gradient(weight: Tensor) -> None:
    weight.grad = torch.zeros_like(weight)
    weight.grad[5, 7] = 1e-6


@pytest.mark.parametrize(
    ("change", "jumps"),
    [
        (lambda made: None, 0),
        (lambda made: made.model.eval(), 1),
        (lambda made: [p.data.add_(1.0) for p in made.model.parameters()], None),
        (lambda made: [e["exp_avg"].add_(1.0) for e in made.optimizer.state.values()], None),
        # What none of the drawn elements meets.
        (lambda made: last_weight(made).data[5].mul_(0.5), 1),
        (lambda made: last_weight(made).data[5, 7].neg_(), 1),
        (lambda made: last_weight(made).data.copy_(last_weight(made).roll(1, 0)), 1),
        (lambda made: last_weight(made).data.copy_(last_weight(made).flip(1)), 1),
        (lambda made: made.model.norm.weight.data[:2].copy_(torch.tensor([1.5, 0.5])), 1),
        (lambda made: made.optimizer.state[last_weight(made)]["exp_avg"][5, 7].add_(1e-6), 1),
        (lambda made: made.optimizer.state[last_weight(made)]["exp_avg_sq"][5, 7].mul_(1.001), 1),
        (lambda made: _leave_gradient(last_weight(made)), 1),
    ],
    ids=(
        *("nothing", "mode", "weights", "moments", "a row", "a sign"),
        *("rows that change places", "columns that do", "two of a vector"),
        *("of a first moment", "of a second moment", "of a gradient"),
    ),
)
@pytest.mark.parametrize("later", [False, True], ids=("meanwhile", "before the next step"))
def test_what_changes_while_all_has_to_rest_is_counted(
    change: Callable[[Engine], object], jumps: int | None, later: bool
) -> None:
    made = engine()
    made.compute([batch(5, 32)])
    made.update(1)
    shadow = Shadow(made, token=TOKEN, first=1, last=STEPS)
    with torch.no_grad(), shadow.unchanged():
        _ = later or change(made)
    if later:
        with torch.no_grad():
            change(made)
    shadow.watch(1)
    found = shadow.report()["jumps"]
    assert found > 1 if jumps is None else found == jumps


@pytest.mark.parametrize("by", [0.0, 1e-6], ids=("the same", "others"))
@pytest.mark.parametrize("trains", [True, False], ids=("after a step", "as gone on from"))
def test_the_weights_of_an_evaluation_are_those_that_the_last_update_left(
    by: float, trains: bool
) -> None:
    """Others that are there for its passes alone would be back when anything else looks."""
    made = engine("--set", "train.eval_every=1")
    shadow = Shadow(made, token=TOKEN, first=1, last=STEPS)
    meter = TokenMeter(made.model)
    for step in range(1, 4 if trains else 1):
        outcome = made.compute([batch(step, 32)])
        made.update(step)
        shadow.updated(step, outcome.norm)
    weights = [p.detach().clone() for p in made.model.parameters()]
    for parameter in made.model.parameters():
        parameter.data.add_(by)
    evaluate(made, meter.passing([batch(9, 32).tokens], shadow.evaluating), drawn=0)
    for parameter, own in zip(made.model.parameters(), weights, strict=True):
        parameter.data.copy_(own)
    assert shadow.report()["jumps"] == (len(weights) if by else 0)


def _first_moment(made: Engine) -> Tensor:
    moment: Tensor = made.optimizer.state[last_weight(made)]["exp_avg"]
    return moment


@pytest.mark.parametrize(
    ("change", "jumps"),
    [
        (lambda made: None, 0),
        # Of all weights, and of a window of them.
        (lambda made: last_weight(made).data.copy_(last_weight(made).bfloat16()), 2),
        (lambda made: _first_moment(made).copy_(_first_moment(made).roll(1, 0)), 1),
        (lambda made: _first_moment(made).copy_(_first_moment(made).roll(1, 1)), 1),
        (lambda made: _first_moment(made).copy_(_first_moment(made).flip(0)), 1),
        (lambda made: _first_moment(made).mul_(0.5), 1),
        (lambda made: made.optimizer.state[last_weight(made)]["exp_avg_sq"].mul_(0.5), 1),
        # The norm of the whole stays as it is, but for the order in which it is added up.
        (lambda made: last_weight(made).data.copy_(last_weight(made).roll(1, 0)), None),
        (lambda made: made.optimizer.state.clear(), 1),
    ],
    ids=(
        *(
            "nothing",
            "weights rounded",
            "rows of a moment",
            "columns of a moment",
            "all upside down",
        ),
        *("a first moment", "a second moment", "rows of weights", "no moments left"),
    ),
)
@pytest.mark.parametrize("inside", [False, True], ids=("between steps", "before the update"))
def test_what_changes_between_two_updates_that_nobody_drew_is_seen(
    change: Callable[[Engine], object], jumps: int | None, inside: bool
) -> None:
    made = engine()
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
