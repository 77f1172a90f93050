"""What watches a launch, behind one interface: before, after, end.

The loop says what it is about to do and what it did: `before` and `after` a step, and at the end of
the launch. What is seen goes to the heartbeats, as events and as fields of the loop's own. Nothing
here changes what is trained, and no step waits for it. A `Witness` is handed the step's objects,
and knows nothing of `nsa.train`.

Behind it: the proof of the first and of the last batch (`gradient_probe`, `oracle_check` with
`oracle`), drawn steps a second time (`shadow`), tokens counted where they are embedded
(`TokenMeter`), and whether toggles took effect (`effect_watch` with `effects`, `profiling`). Before
anything trains, `self_test` holds attention to its equations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nsa.contract import Event, Phase
from nsa.contract.digests import step_weight
from nsa.data import Batch
from nsa.launch.asked import Block
from nsa.launch.output import Heartbeat
from nsa.model import NSALanguageModel
from nsa.rounding import or_null, plain_floats
from nsa.step.compiled import Compiling
from nsa.step.engine import Engine
from nsa.witness.effect_watch import BlockEvidence, EffectLog
from nsa.witness.gradient_probe import (
    Piece,
    first_weights,
    least_by_group,
    pieces,
    probe_gradients,
    text_again,
)
from nsa.witness.profiling import StepProfiler
from nsa.witness.shadow import Shadow

_WORD = 1 << 64
# Evenly spaced elements of each piece, to tell how far it moved in the whole launch.
_SPACED = 2048


class Witness:
    """Watches the steps of one rank's launch, of which `first` is the first."""

    def __init__(self, engine: Engine, *, heartbeat: Heartbeat, run_dir: Path, first: int) -> None:
        self._engine, self._heartbeat, self._first = engine, heartbeat, first
        plan = engine.plan
        self.compiling, self.meter = Compiling(heartbeat), TokenMeter(engine.model)
        self._log = EffectLog(heartbeat, run_dir)
        self._movement = Movement(engine.model)
        self._shadow = Shadow(engine, token=heartbeat.token, first=first, last=plan.total_steps)
        self._profiler: StepProfiler | None = None
        if plan.flags.profile_steps and engine.ranks.rank == 0:
            steps = plan.flags.profile_steps
            self._profiler = StepProfiler(run_dir, steps, engine.device.type, heartbeat)
        self._watched: BlockEvidence  # of the block that has begun
        # Before DDP gives every rank those of rank 0. What goes on from a checkpoint has none.
        self._weights = first_weights(engine.model) if first == 1 else None
        self._begins_trace = False
        self._largest_lr = 0.0
        self._last_proof: dict[str, Any] | None = None
        # Sums of this rank's losses and norms, each times the weight of its step.
        zero = torch.zeros((), dtype=torch.float64, device=engine.device)
        self._steps, self._summed = 0, {"loss": zero, "grad_norm": zero.clone()}

    # -- the launch and its blocks -------------------------------------------------------------

    def before_launch(self, batch: Batch) -> None:
        """Before the first step: does every rank's gradient arrive? A collective."""
        self._heartbeat.phase = Phase.FIRST_STEP
        proof = probe_gradients(self._engine, batch)
        text = text_again(batch, self._engine.plan.config.data)
        self._heartbeat.write(Event.PROOF, **proof, weights=self._weights, text=text)
        self.compiling.note("proof")

    def begin_block(self, block: Block, running: Mapping[str, Any]) -> None:
        """A block's steps begin; `running`: what the objects in charge of toggles work with."""
        self._watched = BlockEvidence(
            block, log=self._log, engine=self._engine, profiler=self._profiler, running=running
        )
        self.compiling.begin_block()

    def end_block(self) -> None:
        """The block's steps are over."""
        self._watched.emit()
        self._watched.judge_steps(self.compiling.in_steps)

    def unchanged(self) -> AbstractContextManager[None]:
        """Around what has to leave weights, moments, gradients and the model's mode as they are."""
        return self._shadow.rest.unchanged()

    def held_out(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """These batches on their way through an evaluation: counted, and the weights looked at."""
        return self.meter.passing(batches, self._shadow.rest.evaluating)

    # -- a step --------------------------------------------------------------------------------

    def before(self, step: int, batches: Sequence[Batch]) -> bool:
        """A step has its micro-batches. Says whether looking took time. A collective."""
        recomputes = step in self._shadow.recomputed
        # The trace names the ranges of one pass; all others run as in any step.
        by_modules, self._begins_trace = int(self._begins_trace), False
        with _passes_as_they_were(self._engine):
            if recomputes:
                self._shadow.recompute(step, batches, from_host=by_modules)
                self._heartbeat.write(Event.RECOMPUTED)
            looked = self._watched.look_apart(batches[0])
        self._engine.model.run_from_host(by_modules)
        self.meter.begin(batches)
        self._shadow.watch(step)
        return recomputes or looked

    def forward(self) -> AbstractContextManager[None]:
        """Around the step's first forward pass."""
        return self._watched.watch()

    def update(self) -> AbstractContextManager[Any]:
        """Around the optimizer's step."""
        return self._watched.watch_update()

    def after(self, step: int, *, loss: Tensor, norm: Tensor, rate: float) -> dict[str, int | str]:
        """The update is over, of this rank's mean loss and a gradient of this norm: what `step_end`
        tells of the tokens.
        """
        self._shadow.updated(step, norm)
        self._steps += 1
        for name, value in (("loss", loss), ("grad_norm", norm)):
            self._summed[name].add_(value.detach(), alpha=step_weight(step))
        self._largest_lr = max(self._largest_lr, rate)
        return self.meter.take()

    def written(self, *, timed: bool) -> bool:
        """The step's row is written; `timed`: its time counts. Says whether looking took time."""
        self.compiling.note("step", timed=timed and self._watched.emitted)
        return self._watched.step_done()

    # -- the profiler --------------------------------------------------------------------------

    @property
    def profiles(self) -> bool:
        """Is a trace being recorded?"""
        return self._profiler is not None and self._profiler.active

    def begin_trace(self) -> bool:
        """A step begins: start what is to be traced. Says whether that took time."""
        if self._profiler is None or not self._profiler.before_step():
            return False
        self._begins_trace = True
        return True

    def end_trace(self) -> bool:
        """A step is over: write what was traced. Says whether that took time."""
        if self._profiler is None or not self._profiler.after_step():
            return False
        self._log.prove_nvtx(self._watched.block, self._profiler)
        return True

    # -- the end -------------------------------------------------------------------------------

    def end(self, batch: Batch) -> None:
        """After the last step: what was right before the first may have gone wrong since.

        A collective.
        """
        # Trained weights make scores so large that what half types round off has no bound.
        exact = self._engine.dtype == torch.float32
        self._last_proof = probe_gradients(self._engine, batch, with_oracle=exact)
        # Do replays still give what the host gives? If not, the toggle had no good effect.
        if self._engine.model.recording is None:
            return
        gap = self._engine.compare_replay()
        if gap.too_wide:
            block = self._engine.plan.blocks[-1]
            evidence = {"after_the_last_step": str(gap)}
            self._log.effect(block, "NSA_CUDA_GRAPHS", False, evidence)

    def parted(self) -> str:
        """Which parameters differ between the ranks, and since when, in words. A collective."""
        return self._shadow.parted()

    def facts(self) -> dict[str, Any]:
        """What the exit event tells of all that was seen. Synchronizes."""
        return {
            **self.meter.sums(),
            "moved": plain_floats(self._movement.by_group()),
            "largest_lr": self._largest_lr,
            "updates": updates(self._engine.optimizer),
            "summed": {
                "steps": self._steps,
                **{name: or_null(float(total)) for name, total in self._summed.items()},
            },
            "shadow": self._shadow.report(),
            "recomputed": self._shadow.report_recomputed(),
            "proof": self._last_proof,
        }


@contextmanager
def _passes_as_they_were(engine: Engine) -> Iterator[None]:
    """Leave what layers keep of a pass: gates that a trainer reads too early would be right else,
    in just those steps in which they are held against others.
    """
    kept = [(one, one.last_gates, one.last_blocks) for one in engine.model.attentions()]
    try:
        yield
    finally:
        for one, gates, blocks in kept:
            one.last_gates, one.last_blocks = gates, blocks


class Movement:
    """How far the parameters moved since this was made, from a sample of every piece."""

    def __init__(self, model: NSALanguageModel) -> None:
        self._start = [(piece, _sample(piece)) for piece in pieces(model)]

    def by_group(self) -> dict[str, float]:
        """Root mean square of the change, of the piece that moved least in each group."""
        changes = [(p, (_sample(p) - before).square().mean().sqrt()) for p, before in self._start]
        return least_by_group([(piece, float(change)) for piece, change in changes])


def _sample(piece: Piece) -> Tensor:
    flat = piece.of(piece.parameter.detach()).flatten()
    return flat[:: max(1, flat.numel() // _SPACED)].double().clone()


def updates(optimizer: Optimizer) -> list[int]:
    """Fewest and most updates of a parameter, as the optimizer itself counts them."""
    counts = [int(entry["step"]) for entry in optimizer.state.values()]
    return [min(counts), max(counts)] if counts else [0, 0]


class TokenMeter:
    """Counts and sums the tokens that enter the embedding, beside those that were fetched."""

    def __init__(self, model: NSALanguageModel) -> None:
        self._counting, self._evaluating = False, False
        self._look: Callable[[], None] | None = None
        self._embedded, self._digest = 0, 0
        self._fetched_sum = 0
        self._embedded_sum: Tensor | None = None
        model.embedding.register_forward_pre_hook(self._see)

    def begin(self, batches: Sequence[Batch]) -> None:
        """A step begins with these micro-batches."""
        self._counting, self._embedded, self._digest = True, 0, 0
        for batch in batches:
            self._add(batch.tokens)
            self._fetched_sum += int(batch.tokens[:, :-1].sum())

    def passing(
        self, batches: Iterable[Tensor], look: Callable[[], None] | None = None
    ) -> Iterator[Tensor]:
        """These held-out batches, digested and counted as they go by; `look`: once in each."""
        self._evaluating, self._embedded, self._digest = True, 0, 0
        self._look = look
        for tokens in batches:
            self._add(tokens)
            yield tokens
        self._evaluating = False

    def _add(self, tokens: Tensor) -> None:
        self._digest = (self._digest + batch_digest(tokens)) % _WORD

    def take(self) -> dict[str, int | str]:
        """A step is over, or held-out batches: tokens embedded, and the digest of its data."""
        self._counting = False
        return {"embedded": self._embedded, "data": f"{self._digest:016x}"}

    def sums(self) -> dict[str, int]:
        """Sums of all tokens of the launch, as fetched and as embedded. Synchronizes."""
        embedded = 0 if self._embedded_sum is None else int(self._embedded_sum)
        return {"fetched_sum": self._fetched_sum, "embedded_sum": embedded}

    def _see(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        tokens = inputs[0]
        if self._evaluating:
            self._embedded += tokens.numel()
            if self._look is not None:
                self._look()
            return
        if not (self._counting and torch.is_grad_enabled()):
            return
        self._embedded += tokens.numel()
        total = tokens.sum()
        self._embedded_sum = total if self._embedded_sum is None else self._embedded_sum + total


def batch_digest(tokens: Tensor) -> int:
    """A 64-bit number for the rows of tokens [B, S+1], whatever their order.

    It is the sum of the rows' digests, so those of several ranks add up to that of one rank that
    reads all their rows.
    """
    rows = (hashlib.blake2b(row.tobytes(), digest_size=8) for row in tokens.numpy())
    return sum(int.from_bytes(row.digest(), "little") for row in rows) % _WORD
