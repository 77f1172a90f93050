"""Steps of the engine beside the optimizer's shadow, and what the account says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from nsa.step.engine import Engine
from nsa.witness.shadow import Shadow
from runbook.accounts.optimizer import shadow_account
from tests.accounts.launches import WORK, changed, ending_of, honest
from tests.train import engines
from tests.train.engines import batch

TOKEN, STEPS = "ab" * 16, 8
SHORT = ["--set", "train.seq_len=32", "--set", "train.warmup_steps=3"]


def engine(*args: str, **toggles: str) -> Engine:
    return engines.engine("--steps", str(STEPS), *SHORT, *args, **toggles)


def trained(made: Engine, first: int = 1, last: int = STEPS) -> dict[str, Any]:
    """What the shadow of these steps tells."""
    shadow = Shadow(made, token=TOKEN, first=first, last=last)
    accum, losses = made.plan.config.train.accumulate_grad_batches, {}
    gates: dict[int, Tensor] = {}
    for step in range(first, last + 1):
        batches = [batch(step + 1000 * made.ranks.rank, 32)] * accum
        if step in shadow.recomputed:
            shadow.recompute(step, batches)
        shadow.watch(step)
        outcome = made.compute(batches)
        losses[step] = float(outcome.loss)
        gates[step] = made.model.gate_numbers()
        made.update(step)
        shadow.updated(step, outcome.norm)
    return {
        **shadow.report(),
        "recomputed": {**shadow.report_recomputed(), "own_losses": losses, "own_gates": gates},
    }


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
