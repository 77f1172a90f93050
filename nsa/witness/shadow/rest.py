"""What has to stay as it is: weights and moments between two updates, and all else around saves.

Counts of what changed all the same; nothing waits for the device before they are asked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nsa.step.engine import Engine
from nsa.witness.shadow.sample import Sample

# Elements of a tensor that are looked at in every step.
_WINDOW = 1 << 16


class Rest:
    """Looks whether what has to rest did; `seed` draws where a look at every step goes."""

    def __init__(self, engine: Engine, sample: Sample, seed: int) -> None:
        self._engine, self._sample = engine, sample
        self._windows = [
            _window(p.numel(), seed + number) for number, p in enumerate(sample.parameters)
        ]
        self._places: list[int] = []
        self._looked_at: list[Tensor] = []
        self._moved: list[Tensor] = []
        self._left: list[Tensor] = []
        # As the last update before an evaluation left them, or the checkpoint that is gone on from.
        self._updated = sample.bits(sample.parameters)
        # As the last update left weights and moments, and how many of these changed since.
        self._norms: Tensor | None = None
        self._changed = torch.zeros((), dtype=torch.int64, device=engine.device)
        # As an evaluation or the like left all, until the next step begins.
        self._resting: Tensor | None = None

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around what has to leave all of this as it is: an evaluation, a save, other toggles.

        Weights and moments, gradients, which would be added to those of the next step, and the
        model's mode: in that of an evaluation nothing is replayed or recomputed. The next step has
        to begin with the same.
        """
        self._look_at_all()
        self._resting = self._all()
        yield
        self._look_at_all()
        self._resting = self._all()

    def evaluating(self) -> None:
        """A held-out batch is in the model, which has to hold what the last update left."""
        now = self._sample.bits(self._sample.parameters)
        self._moved.append((now != self._updated).sum())

    def begins(self, *, drawn: bool) -> None:
        """A step begins; in a drawn one no gradient may be there: its own would be added to it."""
        self._look_at_all()
        if drawn:
            grads = [p.grad for p in self._sample.parameters]
            self._left.append((self._sample.elements(grads) != 0).sum())

    def before_update(self) -> None:
        """Are weights and moments as the last update left them, right before the next one?"""
        if self._norms is not None:
            norms = self._window_norms()
            # What has lost its moments, or got some, has others.
            same = norms.shape == self._norms.shape
            self._changed = self._changed + ((norms != self._norms).sum() if same else 1)
            self._norms = None

    def updated(self, *, evaluates: bool) -> None:
        """An update is over; `evaluates`: an evaluation comes next."""
        if evaluates:
            self._updated = self._sample.bits(self._sample.parameters)
        self._norms = self._window_norms()

    def jumps(self) -> int:
        """Weights, moments and the like that changed where they had to rest. Synchronizes."""
        return int(self._changed) + sum(int(moved) for moved in self._moved)

    def left(self) -> int:
        """Elements that had a gradient before a step's first backward pass. Synchronizes."""
        return sum(int(found) for found in self._left)

    def _look_at_all(self) -> None:
        """Is all as it was left, if it had to rest until now?"""
        if self._resting is not None:
            self._moved.append((self._all() != self._resting).sum())
        self._resting = None

    def _all(self) -> Tensor:
        sample = self._sample
        gradients = sample.bits([p.grad for p in sample.parameters])
        mode = gradients.new_tensor([self._engine.model.training])
        return torch.cat((sample.all_bits().flatten(), gradients, mode))

    def _window_norms(self) -> Tensor:
        """Of the weights [P], then of a window of weights and moments each [up to 3 P].

        In one call, of windows that a cache holds: a look at every step has to be cheap. What
        changes places in a tensor leaves its norm as it is, and that of a window not.
        """
        there = [one for tensors in self._sample.weights_and_moments() for one in tensors]
        places = [0 if tensor is None else tensor.data_ptr() for tensor in there]
        # Cutting tensors takes longer than the look itself, and they stay where they are.
        if places != self._places:
            self._places = places
            self._looked_at = [p.detach() for p in self._sample.parameters] + [
                tensor.view(-1)[window]
                for tensor, window in zip(there, 3 * self._windows, strict=True)
                if tensor is not None
            ]
        return torch.stack(torch._foreach_norm(self._looked_at))


def _window(numel: int, seed: int) -> slice:
    """About half of so many elements, at most `_WINDOW`, at a place that the seed draws."""
    size = min(_WINDOW, max(1, numel // 2))
    begin = random.Random(seed).randint(0, numel - size)  # noqa: S311 - a place, not a secret
    return slice(begin, begin + size)
