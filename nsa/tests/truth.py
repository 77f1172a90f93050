"""What the equations say of a model that the trainer has built, and gradients held against it.

`nsa.witness.oracle`, in NumPy, has no gradients: its side is differences of its loss.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from nsa.step.engine import Engine
from nsa.tests import built
from nsa.witness import oracle

# Central differences with a step of 1e-4: the error of the method is 1e-8 / 6 of the third
# derivative, that of rounding 1e-16 / 1e-4 of the loss: 3e-8 of the usual slope, the two together.
STEP, SLOPES = 1e-4, 1e-6
DIRECTIONS = 2


class Truth:
    """The oracle's side of a case: weights, logits, loss and slopes."""

    def __init__(self, case: str, engine: Engine, seq_len: int) -> None:
        self.cfg, self.weights = built.config(case), built.weights(engine.model)
        self.tokens = built.tokens(seq_len)
        self.output = self.forward(self.weights)
        self.loss = self.loss_of(self.output)
        self.groups = built.groups(engine.model)

    def forward(
        self, weights: dict[str, oracle.Array], *, blocks: list[oracle.Index] | None = None
    ) -> oracle.Output:
        return oracle.model(self.cfg, weights, self.tokens[:, :-1], blocks=blocks)

    def loss_of(self, output: oracle.Output) -> float:
        return oracle.cross_entropy(output.logits, self.tokens[:, 1:])

    def chosen(self) -> list[oracle.Index]:
        """Blocks of each layer as the trainer holds them: [B,S,G,n_sel], ascending, then -1."""
        count = self.cfg.attention.n_sel
        found = []
        for layer in self.output.layers:
            order = np.argsort(~layer.chosen, axis=-1, kind="stable")
            order = np.where(np.take_along_axis(layer.chosen, order, -1), order, -1)
            missing = max(0, count - order.shape[-1])
            room = [(0, 0)] * 3 + [(0, missing)]
            found.append(np.pad(order, room, constant_values=-1)[..., :count])
        return found

    @cached_property
    def slopes(self) -> dict[str, oracle.Array]:
        """Derivatives of the loss in random directions; the choice of blocks has none."""
        blocks, found = self.chosen(), {}
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
