"""First weights against the config: what begins otherwise is named, what is healthy is not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nsa.config import ModelConfig, NSAConfig
from nsa.model import NSALanguageModel
from nsa.witness.gradient_probe import first_weights
from runbook.accounts.first_weights import Group, first_weights_account, groups_of
from runbook.folder.launch.shapes import shape_of, shaped
from runbook.records.evidence import RankLog
from tests.accounts.first_weights import first_weights as rehearsed
from tests.accounts.launches import honest
from tests.accounts.test_workload import of_model

# The shape of configs/cpu_smoke.yaml, and a smaller one with everything that a model can have.
SMOKE = ModelConfig(
    vocab_size=256,
    n_layers=2,
    attention=NSAConfig(dim=128, n_heads=4, n_kv_groups=2, d_k=32, d_v=32, l=16, d=8, l_sel=16),
)
WHOLE = replace(
    SMOKE, tie_embeddings=False, n_layers=3, attention=replace(SMOKE.attention, phi="mlp")
)
Spoil = Callable[[NSALanguageModel], None]


def built(cfg: ModelConfig, seed: int = 1, spoil: Spoil | None = None) -> NSALanguageModel:
    torch.manual_seed(seed)
    model = NSALanguageModel(cfg)
    if spoil is not None:
        with torch.no_grad():
            spoil(model)
    return model


def env(cfg: ModelConfig) -> dict[str, Any]:
    return of_model(cfg, 0)


def ranks_of(*weights: Mapping[str, Any] | None) -> tuple[RankLog, ...]:
    log = honest()[1][0]
    return tuple(replace(log, rank=n, proof={"weights": told}) for n, told in enumerate(weights))


def problems(cfg: ModelConfig, *weights: Mapping[str, Any] | None) -> list[str]:
    return first_weights_account(ranks_of(*weights), env(cfg))


def scaled(factor: float, *parts: str) -> Spoil:
    def spoil(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if any(part in name for part in parts) and "norm" not in name:
                parameter *= factor

    return spoil


def part_of(name: str, change: Callable[[torch.Tensor], object]) -> Spoil:
    def spoil(model: nn.Module) -> None:
        change(model.get_parameter(name))

    return spoil


def rows_alike(weight: torch.Tensor) -> None:
    weight.copy_(weight[:1].expand_as(weight))


@pytest.mark.parametrize("cfg", [SMOKE, WHOLE], ids=["smoke", "whole"])
def test_the_trainers_own_model_begins_as_it_has_to(cfg: ModelConfig) -> None:
    told = first_weights(built(cfg))
    fitted, odd = shaped({"weights": told}, shape_of("events")["proof"], "proof")
    assert (fitted["weights"], odd) == (told, [])
    assert problems(cfg, told, told) == []
    assert problems(cfg, rehearsed(env(cfg))) == []


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (scaled(10.0, ""), r"embedding begins with a deviation of 0\.\d+, has to be 0\.02 \("),
        # Writers of the residual stream that are not scaled by its depth.
        (scaled(math.sqrt(6), "out_proj", "down"), r"out_proj begins .*, has to be 0\.008165 "),
        (scaled(math.sqrt(6), "down"), r"mlp\.down begins with a deviation of .*0\.008165 "),
        (scaled(1.15, "layers.1.mlp.gate_up"), r"gate_up begins .*\(layer 1\)"),
        (part_of("embedding.weight", lambda w: w.add_(0.004)), "embedding begins with a mean of"),
        (
            part_of("head.weight", lambda w: w.clamp_(-0.06, 0.06)),
            "head begins with .* as its largest element",
        ),
        (part_of("embedding.weight", lambda w: w[7, 3].fill_(9.0)), "embedding begins with"),
        (
            part_of("layers.2.attention.gate_bias", lambda w: w[3].fill_(-2.0)),
            r"gate_bias begins between -2 and 0, has to be 0 \(layer 2\)",
        ),
        (part_of("layers.0.mlp.gate_up.weight", rows_alike), "mlp.gate_up begins with"),
    ],
)
def test_weights_that_are_drawn_otherwise_are_named(spoil: Spoil, says: str) -> None:
    found = problems(WHOLE, first_weights(built(WHOLE, spoil=spoil)))
    assert re.search(says, " ".join(found)), found


def test_ranks_begin_alike() -> None:
    """Each by itself begins as it has to: two seeds."""
    one, other = (first_weights(built(SMOKE, seed)) for seed in (1, 2))
    found = problems(SMOKE, one, other)
    assert len(found) == sum(
        group.deviation is not None for group in groups_of(env(SMOKE)).values()
    )
    assert found[0] == "rank 1: embedding begins otherwise than on other ranks"


@pytest.mark.parametrize(
    "change",
    [
        lambda told: {},
        lambda told: {name: group for name, group in told.items() if name != "mlp.down"},
        lambda told: {**told, "more": told["norm"]},
        lambda told: {**told, "norm": {**told["norm"], "least": [None]}},
        lambda told: {**told, "mlp.down": {n: v[:1] for n, v in told["mlp.down"].items()}},
    ],
)
def test_what_is_not_told_is_no_balance(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    told = change(first_weights(built(SMOKE)))
    assert problems(SMOKE, told)
    assert problems(SMOKE, None)


def test_a_launch_that_goes_on_has_no_first_weights() -> None:
    resumed = [replace(rank, first_step=6) for rank in ranks_of(None, None)]
    assert first_weights_account(resumed, env(SMOKE)) == []
    assert first_weights_account([resumed[0], *ranks_of(None)], env(SMOKE))


def drawn(group: Group, random: np.random.Generator) -> dict[str, Any]:
    """What would be told of healthy pieces, by NumPy."""
    draws = np.full((group.pieces, group.size), group.constant)
    if group.deviation is not None:
        draws = random.normal(0.0, group.deviation, draws.shape).astype(np.float32)
    rms = np.sqrt((draws.astype(np.float64) ** 2).mean(1))
    told = {"mean": draws.mean(1), "rms": rms, "least": draws.min(1), "most": draws.max(1)}
    return {
        **{name: column.tolist() for name, column in told.items()},
        "n": [group.size] * group.pieces,
        "signs": [f"{n:x}" for n in random.integers(0, 1 << 63, group.pieces).tolist()],
    }


def test_no_healthy_beginning_alarms_in_2000() -> None:
    """As many layers, each of which is one beginning of all groups that a layer has."""
    attention = replace(WHOLE.attention, dim=32, d_k=8, d_v=8, n_heads=2, n_kv_groups=1, l=8, d=4)
    many = env(replace(WHOLE, attention=attention, vocab_size=64, n_layers=2000))
    random = np.random.default_rng(5)
    told = {name: drawn(group, random) for name, group in groups_of(many).items()}
    assert first_weights_account(ranks_of(told), many) == []
