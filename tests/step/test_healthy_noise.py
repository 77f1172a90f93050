"""Replays of a recording in simulated launches: healthy noise raises no alarm.

In each pass every number that a loss and its gradients are made of is rounded to bf16, up or down
by chance, as another kernel's order of sums would have it. Nothing of the trainer's rounding is
used.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from nsa.step.cuda_graphs import replay_gap

TOKENS = (1, 255)
VOCABULARY = 64
# Of the smallest parameters, the width of a norm, and of a larger one.
SHAPES = ((768,), (96, 64))


class Noisy(nn.Module):
    """A loss of parameters and tokens, whose passes round by chance; `factor` spoils replays."""

    def __init__(self, seed: int, factor: float = 1.0) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(shape, generator=self.draw)) for shape in SHAPES]
        )
        self.slopes = [torch.randn(shape, generator=self.draw) for shape in SHAPES]
        self.embedding = SimpleNamespace(weight=torch.zeros(1))
        self.cfg = SimpleNamespace(vocab_size=VOCABULARY)
        self.recording = object()
        self.factor, self.from_host = factor, 0

    def run_from_host(self, passes: int = 1) -> None:
        self.from_host = passes

    def rounded(self, x: Tensor) -> Tensor:
        """To one of the two numbers of bf16 around it, so that it is right on average."""
        spread = torch.rand(x.shape, generator=self.draw) - 0.5
        size = 2.0 ** torch.floor(torch.log2(x.abs().clamp_min(1e-30))) * 2**-7
        return torch.round(x / size + spread) * size

    def loss(self, tokens: Tensor, *, exact: bool = False) -> Tensor:
        here = self.rounded if not exact else lambda x: x
        factor = 1.0 if exact or self.from_host else self.factor
        if not exact:
            self.from_host = max(0, self.from_host - 1)
        # What tokens have lost, each a number that is rounded, and a mean.
        told = here(4 + (tokens.float() * 0.7).sin()).mean()
        scale = 1 + tokens.float().mean() / VOCABULARY
        for weight, slope in zip(self.weights, self.slopes, strict=True):
            part = (weight * here(slope * scale)).sum()
            told = told + factor * (part - part.detach())
        return told

    def exact(self, tokens: Tensor) -> Tensor:
        return self.loss(tokens, exact=True)


def alarms(launches: int, *, factor: float = 1.0) -> int:
    """In how many simulated launches a replay is not believed."""
    found = 0
    for seed in range(launches):
        model: Any = Noisy(seed, factor)
        found += replay_gap(model, model.loss, model.exact, TOKENS, torch.bfloat16).too_wide
    return found


def test_a_thousand_healthy_launches_raise_no_alarm() -> None:
    assert alarms(1000) == 0


def test_a_gradient_of_another_computation_is_always_seen() -> None:
    assert alarms(50, factor=1.02) == 50
