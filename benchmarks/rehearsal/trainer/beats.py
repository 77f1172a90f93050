"""heartbeat_rank*.jsonl of a rehearsed launch, after docs/trainer-contract.md."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.trainer.job import Job, bucket_mib, wire
from benchmarks.rehearsal.trainer.steps import EVAL_S, PROFILE_FROM, Steps, data_of, seed_of
from nsa.contract import Event, Phase
from nsa.contract.digests import drawn_batch, recomputed_steps, watched_steps
from nsa.launch.asked import Block
from tests.accounts.first_weights import first_weights
from tests.factory.files import Record, record
from tests.factory.told import ORACLE, first_pass, in_force, recomputed, shadow
from tests.phases.trainer import GROUPS, cut_by

# From the start of the process to its first word, to the process group, to the first pass.
BOOT_S, GROUP_S, PROOF_S = 4.2, 9.1, 10.6
STARTED_S = 12.4
# NSA_PG_TIMEOUT_MIN is 15; the host has so many cores, each of two CPUs.
GROUP_TIMEOUT_S, CORES = 900.0, 32


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of a launch and its memory: what its records have in common.

    began_s: when its first step begins, on the machine's clock; wall_s: what to add for the wall.
    """

    machine: Machine
    job: Job
    steps: Steps
    rank: int
    began_s: float
    wall_s: float

    @property
    def pid(self) -> int:
        """A number above Linux's largest process id: no process of this machine is meant."""
        return 4_200_000 + seed_of(self.job.where, self.job.token) % 90_000 + self.rank

    def record(self, event: Event, at_s: float, *, step: int, phase: Phase, **more: Any) -> Record:
        """A heartbeat at a time, in s from the beginning of the first step."""
        mono = self.began_s + at_s
        return record(
            event,
            mono=round(mono, 6),
            ts=round(mono + self.wall_s, 6),
            rank=self.rank,
            pid=self.pid,
            token=self.job.token,
            step=step,
            phase=phase,
            rss_mib=2900.0 + self.rank,
            cuda_mib=None if step == 0 and event == Event.BOOT else self.memory(step)[0],
            **more,
        )

    def memory(self, step: int) -> tuple[float, float, float]:
        """MiB after a step: tensors, the most that tensors took, the most that was reserved.

        Weights, both moments and DDP's buckets are float32. results/step_calls.md counts 1,913 MiB
        for one sequence with weights and gradients.
        """
        weights = self.job.gradient_mib
        kept = weights * (4 if self.job.plan.ddp else 3)
        activations = (1913 - 2 * weights) * self.job.plan.per_rank_batch
        leak = self.machine.leak_mib_per_step.get(self.rank, 0.0) * step
        settling = 40.0 * min(1.0, step / 4)
        peak = kept + weights + activations + settling + leak
        return round(kept + leak, 1), round(peak, 1), round(peak * 1.08 + 180, 1)

    def lines(self, stop: int, failed: int | None = None) -> Iterator[Record]:
        """Everything up to the end of step `stop`; `failed` is a step that is begun, no more."""
        yield self.record(Event.BOOT, BOOT_S - STARTED_S, step=0, phase=Phase.INIT)
        yield self.record(Event.DATA_START, GROUP_S - STARTED_S, step=0, phase=Phase.DATA)
        yield self.record(Event.INIT_DONE, GROUP_S + 0.1 - STARTED_S, step=0, phase=Phase.INIT)
        yield self.record(
            Event.PROOF, PROOF_S - STARTED_S, step=0, phase=Phase.FIRST_STEP, **self._proof(0)
        )
        data = data_of(self.job)
        last = 0.0
        for at in range(stop):
            for made in self._one_step(at, data.of_step(self.rank, at + 1), last, stop):
                yield made
                last = max(last, made["mono"] - self.began_s)
        if failed is not None:
            phase = Phase.STEP if failed > 1 else Phase.FIRST_STEP
            yield self.record(Event.STEP_START, last + 1e-4, step=failed, phase=phase)
            yield self.record(Event.FETCHED, last + 6e-4, step=failed, phase=phase)

    def _one_step(self, at: int, digest: str, last: float, stop: int) -> Iterator[Record]:
        job, steps, number = self.job, self.steps, at + 1
        block, first_of_block = self._block(at)
        if first_of_block and at > 0:
            yield from self._refusals(at, last)
        ended = float(steps.host_end_s[self.rank, at])
        phase = Phase.FIRST_STEP if number == 1 else Phase.STEP
        yield self.record(Event.STEP_START, last + 5e-5, step=number, phase=Phase.DATA)
        fetched = min(last + 1e-4 + float(steps.fetch_s[at]), ended - 2e-4)
        profiled = job.plan.flags.profile_steps if self.rank == 0 else 0
        if profiled and number == PROFILE_FROM:
            yield self.record(
                Event.PROFILER, last + 6e-5, step=number, phase=Phase.DATA, active=True
            )
        yield self.record(Event.FETCHED, fetched, step=number, phase=phase)
        if number in self._twice():
            yield self.record(Event.RECOMPUTED, fetched + 1e-5, step=number, phase=phase)
        if at > 0 and not first_of_block and not job.evaluates(at):
            yield self._progress(at - 1, ended - 1e-4, number, phase)
        if profiled and number == PROFILE_FROM + profiled - 1:
            yield self.record(Event.PROFILE_SAVE, ended - 8e-5, step=number, phase=Phase.PROFILE)
            yield self.record(
                Event.PROFILER, ended - 5e-5, step=number, phase=Phase.STEP, active=False
            )
        _, peak, reserved = self.memory(number)
        yield self.record(
            Event.STEP_END,
            ended,
            step=number,
            phase=phase,
            embedded=job.rank_tokens,
            data=digest,
            mem_mib=peak,
            reserved_mib=reserved,
        )
        over = max(ended, float(steps.device_end_s[at]))
        if number == stop or self._block(at + 1)[1] or job.evaluates(number):
            yield self._progress(at, over + 3e-4, number, phase)
        if job.evaluates(number):
            yield from self._evaluation(at, over)
        # DDP has built its buckets anew after the second step of a block.
        if at > 0 and self._block(at - 1)[1] and not first_of_block:
            yield from self._effects(block, number, ended + 3.5e-4)

    def _evaluation(self, at: int, over: float) -> Iterator[Record]:
        loss, batches = float(self.steps.loss[at]) + 0.01, self.job.train.eval_batches
        told = {
            "loss": loss,
            "losses": [loss] * batches,
            "again": {
                "batch": drawn_batch(self.job.token, self.rank, at + 1, batches),
                "loss": loss,
            },
            "embedded": batches * math.prod(self.job.plan.micro_batch),
            "seconds": EVAL_S - 0.02,
            "data": data_of(self.job).held_out(self.rank, batches),
        }
        yield self.record(Event.EVAL_START, over + 1e-3, step=at + 1, phase=Phase.EVAL)
        yield self.record(Event.EVAL, over + EVAL_S - 0.01, step=at + 1, phase=Phase.EVAL, **told)

    def _refusals(self, at: int, last: float) -> Iterator[Record]:
        """Arms that a rank could not run come before the next one that it can."""
        first = self.job.blocks[0]
        for block in self.job.refused if at == first.total_steps else ():
            yield self.record(
                Event.ARM_FAILED, last + 2e-5, step=at, phase=Phase.STEP, arm=block.arm,
                block=block.index, error="No available kernel. Aborting execution.",
            )  # fmt: skip

    def _block(self, at: int) -> tuple[Block, bool]:
        """The block of a step, and whether the step is its first."""
        place = self.steps.block[at]
        return self.job.blocks[place], at == 0 or self.steps.block[at - 1] != place

    def _progress(self, at: int, when_s: float, step: int, phase: Phase) -> Record:
        steps = self.steps
        told = {
            "step": at + 1,
            "loss": float(steps.loss[at]),
            "fetch_s": float(steps.fetch_s[at]),
            "toks_per_s": round(self.job.plan.tokens_per_step / float(steps.dt_s[at]), 3),
            "grad_norm": float(steps.norm[at]),
        }
        return self.record(Event.PROGRESS, when_s, step=step, phase=phase) | told

    def _effects(self, block: Block, step: int, at_s: float) -> Iterator[Record]:
        """Every toggle of a block took effect, and DDP has its buckets."""
        own = {"step": step, "phase": Phase.STEP, "arm": block.arm, "block": block.index}
        if self.job.plan.ddp:
            sizes = cut_by(bucket_mib(block), self.job.gradient_mib)
            yield self.record(Event.DDP_BUCKETS, at_s, **own, **sizes)
        for name in block.toggles.sources:
            told = {"toggle": name, "value": block.toggles.values[name], "evidence": "seen"}
            yield self.record(Event.EFFECT, at_s + 5e-5, took_effect=True, **told, **own)

    # -- proofs and the end ------------------------------------------------------------------------

    def _proof(self, done: int) -> Mapping[str, Any]:
        """What the known numbers came out as, and the model against its equations."""
        job, machine, ranks = self.job, self.machine, self.job.ranks
        # Known numbers of rank r are r + 1 times those of rank 0, so their mean is this times them.
        mean = (ranks + 1) / 2
        share = {"sum": float(ranks), "own": (self.rank + 1) / mean}.get(machine.gradient, 1.0)
        config = job.plan.config.model_dump()
        told = first_pass(
            float(self.steps.loss[max(0, done - 1)]) + 0.004 * (self.rank - (ranks - 1) / 2),
            positions=math.prod(job.plan.micro_batch),
            own_gradient=dict.fromkeys(GROUPS, 1e-3),
            wire=wire(job.blocks[0]) if job.plan.ddp else "fp32",
            oracle={
                **ORACLE,
                "positions": [0, 9, 99],
                "layers": float(job.model.n_layers),
                "shape": {**config["model"], **config["nsa"]},
                **dict.fromkeys(("attention", "gates", "layer", "logits"), machine.attention_error),
            },
            weights=first_weights(
                {"config": config, "effective": {"vocab_size": job.model.vocab_size}}
            ),
        )
        scaled = ("mean_low", "mean_high", "norm_told", "norm_before")
        return told | {name: round(told[name] * share, 9) for name in scaled}

    def end(self, at_s: float, code: int, reason: str, done: int) -> Record:
        """The exit event, with what happened to tokens and parameters."""
        told = self._accounts(done) if code == 0 else {}
        return self.record(
            Event.EXIT, at_s, step=done, phase=Phase.EXIT, code=code, reason=reason,
            steps_done=done, **told,
        )  # fmt: skip

    def _accounts(self, done: int) -> Mapping[str, Any]:
        job, rates = self.job, self.steps.rate[:done]
        tokens_sum = job.rank_tokens * done * 127 + self.rank
        largest = float(rates.max())
        # Adam's steps partly cancel: the way is longer than the distance.
        moved = max(float(rates.sum()) * 0.22, 0.4 * largest)
        told = {"loss": self.steps.loss[:done], "grad_norm": self.steps.norm[:done]}
        table = pd.DataFrame({"step": range(1, done + 1), **told})
        twice = recomputed(self._twice(), table, layers=job.model.n_layers)
        watched = watched_steps(self.job.token, 1, job.plan.total_steps)
        return {
            "param_hash": hashlib.sha256(f"{job.where} {self.job.token}".encode()).hexdigest(),
            "fetched_sum": tokens_sum,
            "embedded_sum": tokens_sum,
            "moved": dict.fromkeys(GROUPS, moved),
            "largest_lr": largest,
            "updates": [done, done],
            "shadow": shadow([step for step in watched if step <= done]),
            "recomputed": twice | ({"gates": None} if self.rank else {}),
            "proof": self._proof(done),
            "in_force": in_force(job.ranks, {}, cpus=2 * CORES),
        }

    def _twice(self) -> tuple[int, ...]:
        profiled = self.job.plan.flags.profile_steps > 0
        return recomputed_steps(self.job.token, 1, self.job.plan.total_steps, profiled=profiled)
