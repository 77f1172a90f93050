"""An evaluation: the loss of every held-out batch, and that of a drawn one by another way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from nsa.contract import Event, Phase
from nsa.contract.digests import drawn_batch
from nsa.data.source import Source
from nsa.launch.output import Heartbeat, say
from nsa.step.engine import Engine
from nsa.train.settle import Tables
from nsa.witness.shadow.recompute import loss_again
from nsa.witness.witness import Witness


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation came to, in nats: a mean over ranks and batches, this rank's batches.

    kept: the batch that was drawn; None where there are fewer.
    """

    loss: float
    losses: list[float]
    kept: Tensor | None


def evaluate(engine: Engine, batches: Iterable[Tensor], *, drawn: int) -> Evaluation:
    """Next-token losses of these batches [B, S+1]; `drawn`: which one to keep, counted from 0.

    A collective of all ranks.
    """
    losses: list[float] = []
    kept: Tensor | None = None
    engine.model.eval()
    with torch.no_grad():
        for number, tokens in enumerate(batches):
            losses.append(float(engine.loss(tokens.to(engine.device), wrapped=False)))
            kept = tokens if number == drawn else kept
    engine.model.train()
    total, count = engine.ranks.sum([sum(losses), float(len(losses))])
    return Evaluation(loss=total / count, losses=losses, kept=kept)


class Evaluations:
    """The evaluations of a launch, each with its row and its heartbeat."""

    def __init__(
        self, engine: Engine, *, tables: Tables, heartbeat: Heartbeat, witness: Witness
    ) -> None:
        self._engine, self._witness = engine, witness
        self._tables, self._heartbeat = tables, heartbeat
        # Step and loss of the latest one.
        self._latest: tuple[int, float] | None = None

    def run(self, step: int, source: Source) -> None:
        """Evaluate after this step, on the source's held-out batches. For all ranks together."""
        beat, begin = self._heartbeat, perf_counter()
        rank = self._engine.ranks.rank
        beat.phase = Phase.EVAL
        beat.write(Event.EVAL_START)
        count = self._engine.plan.config.train.eval_batches
        drawn = drawn_batch(beat.token, rank, step, count)
        held_out = self._witness.held_out(source.validation(count))
        found = evaluate(self._engine, held_out, drawn=drawn)
        self._witness.compiling.note("eval")
        self._latest = (step, found.loss)
        self._tables.val(step, found.loss)
        # By another way, when whatever an evaluation sets has to be as it was.
        again = None
        if found.kept is not None:
            again = {"batch": drawn, "loss": loss_again(self._engine, found.kept)}
        beat.write(
            Event.EVAL,
            loss=found.loss,
            losses=found.losses,
            again=again,
            **self._witness.meter.passed(),
            seconds=round(perf_counter() - begin, 4),
        )
        say(f"[eval] step {step} loss={found.loss:.4f}", rank=rank)
        beat.sync()

    def loss_at(self, step: int) -> float | None:
        """The loss of an evaluation at this very step, where there was one."""
        if self._latest is None or self._latest[0] != step:
            return None
        return self._latest[1]
