"""A second optimizer beside the real one: what it looks at, and when.

At a few pairs of steps that the run's token draws, a sample of every piece of the parameters is
noted (`sample`): gradient as reduced and before it is clipped, weight and both moments before and
after the update. In some of these steps loss and gradient are computed a second time (`recompute`).
In between all has to rest (`rest`). Nothing waits for the device before the run has ended: then
what was noted is held against the equations (`report`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from nsa.contract.digests import recomputed_steps, watched_steps
from nsa.data.source import Batch
from nsa.step.engine import Engine
from nsa.witness.accounts import plain_floats
from nsa.witness.shadow import report
from nsa.witness.shadow.recompute import Recomputed, recompute, step_off
from nsa.witness.shadow.rest import Rest
from nsa.witness.shadow.sample import SAMPLED, Begun, Sample, Seen


class Shadow:
    """Watches the optimizer in the drawn steps of a launch that goes from `first` to `last`."""

    def __init__(self, engine: Engine, *, token: str, first: int, last: int) -> None:
        self._engine, self._seed = engine, _seed(token)
        self._watched = frozenset(watched_steps(token, first, last))
        profiled = engine.plan.flags.profile_steps > 0
        self.recomputed = frozenset(recomputed_steps(token, first, last, profiled=profiled))
        self._sample = Sample(engine, self._seed)
        self._rest = Rest(engine, self._sample, self._seed)
        # By the step.
        self._again: dict[int, Recomputed] = {}
        self._off: dict[int, dict[str, float]] = {}
        self._begun: dict[int, Begun] = {}
        self._seen: dict[int, Seen] = {}
        self._rate = 0.0

    def unchanged(self) -> AbstractContextManager[None]:
        """Around what has to leave weights, moments, gradients and mode: see `Rest.unchanged`."""
        return self._rest.unchanged()

    def evaluating(self) -> None:
        """A held-out batch is in the model, which has to hold what the last update left."""
        self._rest.evaluating()

    def recompute(self, step: int, batches: Sequence[Batch], *, from_host: int = 0) -> None:
        """What the step that is about to begin has to make of these micro-batches. A collective.

        from_host: so many passes the modules will run themselves, whatever is recorded or compiled.
        """
        self._again[step] = recompute(
            self._engine,
            batches,
            self._sample.parameters,
            sample=self._sample.gradient,
            seed=self._seed + step,
            from_host=from_host,
            together=SAMPLED if step == min(self.recomputed) else None,
        )
        # The proof held the first batch.
        if step > min(self.recomputed):
            seed, begins = self._seed + step + self._engine.ranks.rank, step - 1
            # Of trained weights values have no bound in half types.
            values = self._engine.plan.config.runtime.precision == "fp32"
            slope = values and (begins not in self.recomputed or begins == min(self.recomputed))
            self._off[step] = step_off(self._engine, batches[0], seed, values=values, slope=slope)

    def watch(self, step: int) -> None:
        """A step begins. Right before its update look at what that begins with, and note the
        gradient before it is clipped, if the step is a drawn one.
        """
        drawn = step in self._watched
        self._rest.begins(drawn=drawn)

        def before_clipping() -> None:
            self._rest.before_update()
            if drawn:
                self._begun[step] = self._sample.begun()

        self._engine.before_clipping = before_clipping

    def updated(self, step: int, norm: Tensor) -> None:
        """The step's update is over; `norm`: of its gradients, as the trainer tells it."""
        every = self._engine.plan.config.train.eval_every
        self._rest.updated(evaluates=bool(every) and step % every == 0)
        # Numbers of the host: those of every step.
        rates = [float(group["lr"]) for group in self._engine.optimizer.param_groups]
        due = self._engine.rate(step)
        self._rate = report.worst([self._rate, *(abs(own - due) / (due or 1.0) for own in rates)])
        if step in self._begun:
            self._seen[step] = self._sample.seen(self._begun.pop(step), norm)

    def report(self) -> dict[str, Any]:
        """The steps watched, and the largest gap of each kind. Synchronizes.

        `weight`, `first_moment`, `second_moment`: from AdamW's equation, in roundoffs of float32;
        `norm` and `rate`: from the true norm and, of all steps, from the schedule, as shares;
        `jumps`: weights and moments of parameters that were not before a step what they were after
        the one before, that changed where all has to rest, or that an evaluation had otherwise than
        the last update left them, and counts that did not go up by one; `left`: elements that had a
        gradient before the step's first backward pass.
        """
        gaps, jumps = report.Updates(self._engine, self._sample).gaps(self._seen)
        told = plain_floats({**gaps, "rate": self._rate})
        rest = {"jumps": jumps + self._rest.jumps(), "left": self._rest.left()}
        return {"steps": list(self._seen), **told, **rest}

    def parted(self) -> str:
        """Which parameters differ between the ranks, and since when, in words. A collective."""
        return report.parted(self._engine, self._sample, self._seen)

    def report_recomputed(self) -> dict[str, Any]:
        """What `report.gradients` says of the steps that were computed twice. Synchronizes."""
        return report.gradients(self._engine, self._sample, self._again, self._seen, self._off)


def _seed(token: str) -> int:
    return int.from_bytes(hashlib.blake2b(token.encode(), digest_size=7).digest(), "little")
