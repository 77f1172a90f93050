"""The shadow of the optimizer, and a step computed twice: silent beside healthy ones."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import layer as layer_module
from nsa.attention.branches import Branches
from nsa.attention.tracing import count_ranges, is_watched
from nsa.step.engine import Engine
from nsa.step.numbers import is_fused, switched
from nsa.witness.shadow import Shadow, sample
from nsa.witness.shadow.recompute import branch_use
from nsa.witness.witness import updates
from runbook.accounts.gradients import shadow_account
from tests.accounts.launches import WORK, changed, ending_of, honest
from tests.train import engines
from tests.train.engines import batch
from tests.train.launching import free_port

TOKEN, STEPS = "ab" * 16, 8
SHORT = ["--set", "train.seq_len=32", "--set", "train.warmup_steps=3"]


def engine(*args: str, **toggles: str) -> Engine:
    return engines.engine("--steps", str(STEPS), *SHORT, *args, **toggles)


def trained(made: Engine, first: int = 1, last: int = STEPS) -> dict[str, Any]:
    """What the shadow of these steps tells."""
    shadow = Shadow(made, token=TOKEN, first=first, last=last)
    accum = made.plan.config.train.accumulate_grad_batches
    for step in range(first, last + 1):
        batches = [batch(step + 1000 * made.ranks.rank, 32)] * accum
        if step in shadow.recomputed:
            shadow.recompute(step, batches)
        shadow.watch(step)
        outcome = made.compute(batches)
        made.update(step)
        shadow.updated(step, outcome.norm)
    return {**shadow.report(), "recomputed": shadow.report_recomputed()}


def problems(told: dict[str, Any], first: int = 1, last: int = STEPS) -> list[str]:
    """What the account says about it."""
    (rank,) = changed(honest()[1][:1], 0, first_step=first, tokens=frozenset({TOKEN}))
    assert rank.steps is not None
    rank = replace(rank, steps=rank.steps[rank.steps["step"].between(first, last)])
    own = ending_of((rank,), 0, shadow=told, recomputed=told["recomputed"])
    return shadow_account(own, replace(WORK, steps=last, dtype="fp32", wire="fp32", device="cpu"))


def last_weight(made: Engine) -> Tensor:
    """Of the last layer, what writes into the residual stream."""
    weight: Tensor = made.model.layers[1].get_parameter("mlp.down.weight")
    return weight


@pytest.mark.parametrize(("precision", "fused"), [("fp32", "1"), ("bf16", "0"), ("fp16", "1")])
def test_a_healthy_optimizer_agrees_with_its_shadow(
    precision: str, fused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 with parameters of one shape together, as on a GPU."""
    if precision == "bf16":
        monkeypatch.setitem(sample._TOGETHER, "cpu", 1 << 24)
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


def _one_of_two(rank: int, port: int) -> list[dict[str, Any]]:
    """What a rank tells of two steps; from the second on, rank 1 halves the gates' gradient."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    made = engine("--ddp", "1", **os.environ)
    healthy, split = trained(made, last=1)["recomputed"], layer_module.split_projection

    def weakened(*args: Any) -> Branches:
        parts = split(*args)
        return replace(parts, gates=(parts.gates + parts.gates.detach()) / 2)

    if rank == 1:
        layer_module.split_projection = weakened
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
