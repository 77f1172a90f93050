"""What the equations say of a model that the trainer has built, and gradients held against it.

The whole model, of the parts of `nsa.witness.oracle`, and its choice of blocks. In NumPy there are
no gradients: this side is differences of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nsa.config import ModelConfig, NSAConfig
from nsa.step.engine import Engine
from nsa.tests import built
from nsa.witness import oracle

# Central differences with a step of 1e-4: the error of the method is 1e-8 / 6 of the third
# derivative, that of rounding 1e-16 / 1e-4 of the loss: 3e-8 of the usual slope, the two together.
STEP, SLOPES = 1e-4, 1e-6
DIRECTIONS = 2


@dataclass(frozen=True, kw_only=True)
class Output:
    """Logits [B,S,V] of the model, its attention layers at every position, and their blocks."""

    logits: oracle.Array
    layers: tuple[oracle.Attended, ...]
    blocks: tuple[oracle.Index, ...]


def choose(cfg: NSAConfig, scores: oracle.Array) -> oracle.Index:
    """Equation 11: the forced blocks and the best others, ties to the lower one.

    For every position of scores [B,S,G,M], as the trainer holds them: [B,S,G,n_sel], ascending,
    then -1.
    """
    chosen = np.full((*scores.shape[:3], cfg.n_sel), -1)
    for b, t, g in np.ndindex(scores.shape[:3]):
        now, row = t // cfg.l_sel, scores[b, t, g]
        forced = {0, now, max(0, now - 1)}
        rest = [j for j in range(now + 1) if j not in forced]
        rest.sort(key=lambda j, row=row: (-row[j], j))  # type: ignore[misc]
        taken = sorted([*forced, *rest[: cfg.n_sel - len(forced)]])
        chosen[b, t, g, : len(taken)] = taken
    return chosen


def model(
    cfg: ModelConfig,
    weights: oracle.Weights,
    tokens: oracle.Index,
    blocks: Sequence[oracle.Index] | None = None,
) -> Output:
    """The language model for tokens [B,S]; `blocks`: for each layer, else those that it chooses."""
    x, layers, taken, at = weights["embedding.weight"][tokens], [], [], np.arange(tokens.shape[1])
    for number in range(cfg.n_layers):
        own = oracle.below(weights, f"layers.{number}.")
        if blocks is None:
            # Scores are the same, whatever is read.
            none = np.full((*tokens.shape, cfg.attention.n_kv_groups, 1), -1)
            scored = oracle.layer(cfg, own, x, at=at, blocks=none)[1].scores
            taken.append(choose(cfg.attention, scored))
        else:
            taken.append(blocks[number])
        x, found = oracle.layer(cfg, own, x, at=at, blocks=taken[-1])
        layers.append(found)
    return Output(logits=oracle.head(cfg, weights, x), layers=tuple(layers), blocks=tuple(taken))


def cross_entropy(logits: oracle.Array, targets: oracle.Index) -> float:
    """Mean of -ln softmax(logits)[target], in nats: logits [B,S,V], targets [B,S]."""
    peak = logits.max(-1)
    total = peak + np.log(np.exp(logits - peak[..., None]).sum(-1))
    hit = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return float((total - hit).mean())


class Truth:
    """The oracle's side of a case: weights, logits, loss and slopes."""

    def __init__(self, case: str, engine: Engine, seq_len: int) -> None:
        self.cfg, self.weights = built.config(case), built.weights(engine.model)
        self.tokens = built.tokens(seq_len)
        self.output = self.forward(self.weights)
        self.loss = self.loss_of(self.output)
        self.groups = built.groups(engine.model)

    def forward(
        self, weights: oracle.Weights, *, blocks: Sequence[oracle.Index] | None = None
    ) -> Output:
        return model(self.cfg, weights, self.tokens[:, :-1], blocks)

    def loss_of(self, output: Output) -> float:
        return cross_entropy(output.logits, self.tokens[:, 1:])

    @cached_property
    def slopes(self) -> dict[str, oracle.Array]:
        """Derivatives of the loss in random directions; the choice of blocks has none."""
        blocks, found = self.output.blocks, {}
        for name, group in self.groups.items():
            sides = [
                [
                    self.loss_of(self.forward(group.moved(self.weights, way, step), blocks=blocks))
                    for step in (STEP, -STEP)
                ]
                for way in self.ways(group)
            ]
            found[name] = -np.diff(sides)[:, 0] / (2 * STEP)
        return found

    def ways(self, group: built.Group) -> list[list[oracle.Array]]:
        """The random directions of a group."""
        return [group.direction(self.weights, seed) for seed in range(DIRECTIONS)]

    def check_gradients(self, engine: Engine, bound: float) -> None:
        """The gradients that the model's parameters hold, against the slopes."""
        named = dict(engine.model.named_parameters())
        absent = [name for name, parameter in named.items() if parameter.grad is None]
        assert not absent, f"no gradient: {absent}"
        grads = {name: p.grad.cpu().numpy() for name, p in named.items() if p.grad is not None}
        for name, group in self.groups.items():
            expected = self.slopes[name]
            found = np.array([group.slope(grads, way) for way in self.ways(group)])
            usual = float(np.sqrt((expected**2).mean()))
            worst = float(np.abs(found - expected).max())
            assert worst <= bound * usual + 1e-11, f"d {name}: {found}, not {expected}"
