"""The steps of one launch on one machine: when each ends, by device and by host, and what it says.

Times come from the roofline, with noise from step to step and from launch to launch. The host runs
at most one step ahead of the device, as on CUDA.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.roofline import HOST_S, step_time
from benchmarks.rehearsal.trainer.job import Job
from nsa.data import chain_entropy_nats
from nsa.launch.asked import Block
from nsa.step.numbers import learning_rate
from runbook.accounts import GeneratedData

# Standard deviations, as shares: of one launch's pace, and of one step's time.
LAUNCH_NOISE, STEP_NOISE = 0.01, 0.006
# The first steps load kernels, tune them, and build DDP's buckets; a new block builds them anew.
FIRST_STEPS_S, FIRST_OF_BLOCK_S = (2.6, 0.21, 0.04), (0.12, 0.03)
# An evaluation stands between two steps and counts for neither.
EVAL_S = 0.42
# torch's profiler makes each launch of an operator dearer.
PROFILED_HOST = 1.9
PROFILE_FROM = 6
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Every step of a launch. Arrays have one entry for each step; `host_end_s` one row per rank.

    Times count from the beginning of the first step. `busy` is the share of it in which each
    GPU computes.
    """

    block: npt.NDArray[np.int64]
    dt_s: Floats
    device_end_s: Floats
    host_end_s: Floats
    busy: Floats
    fetch_s: Floats
    loss: Floats
    norm: Floats
    rate: Floats


def seed_of(*words: object) -> int:
    """The same for the same words, on every machine and in every process."""
    return zlib.crc32(" ".join(map(str, words)).encode())


def simulate(machine: Machine, job: Job, seed: int) -> Steps:
    """All steps of a launch that nothing stops."""
    random = np.random.default_rng([seed, seed_of(job.where)])
    block = np.concatenate([np.full(b.total_steps, place) for place, b in enumerate(job.blocks)])
    modeled = [block_time(machine, job, one) for one in job.blocks]
    total = np.array([modeled[place][0] for place in block])
    busy = np.array([modeled[place][1] for place in block])
    host = np.array([modeled[place][2] for place in block])
    count = len(block)
    launch = math.exp(random.normal(0.0, LAUNCH_NOISE))
    dt = total * launch * np.exp(random.normal(0.0, STEP_NOISE, count))
    if job.where.startswith("long_run"):
        dt *= 1.0 + machine.slower_at_end * np.arange(count) / count
    computing = busy * (total * launch)[:, None]
    ahead = np.clip(total - host, 0.002, None)
    if profiled := job.plan.flags.profile_steps:
        watched = slice(PROFILE_FROM - 1, PROFILE_FROM + profiled)
        dt[watched] = np.maximum(dt[watched], host[watched] * PROFILED_HOST)
    fetch = np.full(count, machine.fetch_s) * np.exp(random.normal(0.0, 0.1, count))
    dt += np.maximum(0.0, fetch - 0.002)
    if machine.stall_every:
        late = np.arange(count) % machine.stall_every == machine.stall_every - 1
        fetch[late] += machine.stall_s
        dt[late] += machine.stall_s
    dt = np.round(_begin(dt, block), 7)
    gaps = np.where(np.diff(block, prepend=block[:1]) > 0, 0.03, 0.0)
    gaps += EVAL_S * np.array([job.evaluates(at) for at in range(count)])
    device_end = np.cumsum(dt + gaps)
    return Steps(
        block=block,
        dt_s=dt,
        device_end_s=device_end,
        host_end_s=_host_ends(job, device_end, ahead, random),
        busy=np.minimum(1.0, computing / dt[:, None]),
        fetch_s=np.round(fetch, 7),
        loss=_losses(machine, job, count),
        norm=np.abs(random.normal(1.1, 0.12, count)) + 0.05,
        rate=learning_rates(job, count),
    )


def block_time(machine: Machine, job: Job, block: Block) -> tuple[float, list[float], float]:
    """Seconds of an ordinary step, each GPU's share of computing in it, and the host's seconds."""
    by_math = "math" in " ".join(machine.kernels.values())
    paces = [replace(machine.trains(rank), math=by_math) for rank in range(job.ranks)]
    times = [step_time(machine.card, job, block, pace, machine.training_link) for pace in paces]
    compute, waited, busy = zip(*times, strict=True)
    total = max(compute) + max(waited)
    host = job.train.accumulate_grad_batches * HOST_S * max(pace.host for pace in paces)
    return total, [one / total for one in busy], host


def _begin(dt: Floats, block: npt.NDArray[np.int64]) -> Floats:
    slow = dt.copy()
    slow[: len(FIRST_STEPS_S)] += FIRST_STEPS_S[: len(slow)]
    for place in np.flatnonzero(np.diff(block) > 0) + 1:
        slow[place : place + 2] += FIRST_OF_BLOCK_S[: len(slow) - place]
    return slow


def _host_ends(job: Job, device_end: Floats, ahead: Floats, random: np.random.Generator) -> Floats:
    """When each rank notes the end of a step: it has launched it, and the one before is over.

    ahead: seconds by which the host is done before the device, which it never is by a whole step.
    """
    before = np.concatenate([[0.0], device_end[:-1]])
    jitter = np.abs(random.normal(0.0, 5e-5, (job.ranks, len(ahead))))
    ends: Floats = np.maximum(before + 4e-4, device_end - ahead) + jitter
    return ends + 1e-5 * np.arange(job.ranks)[:, None]


def learning_rates(job: Job, count: int) -> Floats:
    """Those of the trainer's own schedule."""
    total = job.plan.schedule_steps
    rates = [learning_rate(n, job.train, total_steps=total) for n in range(1, count + 1)]
    return np.array(rates)


def floor_of(job: Job) -> float:
    """What no model gets below, nats."""
    return chain_entropy_nats() if job.dataset == "markov" else math.log(job.model.vocab_size)


def _losses(machine: Machine, job: Job, count: int) -> Floats:
    """Near ln(V) at first, then towards the floor as the rate adds up; the data decide the noise.

    The same rows of data give the same first loss, however they are spread over ranks.
    """
    rows = job.train.batch_size * job.train.accumulate_grad_batches
    random = np.random.default_rng(seed_of("loss", job.dataset, rows))
    uniform, floor = math.log(job.model.vocab_size), floor_of(job)
    start = uniform + 0.055
    learned = np.cumsum(learning_rates(job, count)) / 0.02
    # Without learning only what the first weights did wrong by themselves goes away.
    end = floor if machine.learns else uniform
    loss = end + (start - end) * np.exp(-learned if machine.learns else -5 * learned)
    spread = 0.11 / math.sqrt(job.plan.tokens_per_step / 128)
    return np.round(loss + random.normal(0.0, spread, count), 9)


def data_of(job: Job) -> GeneratedData:
    """What the ranks of a launch read."""
    return GeneratedData(
        kind=job.dataset,
        seed=job.train.seed,
        vocab_size=job.model.vocab_size,
        seq_len=job.train.seq_len,
        nproc=job.ranks,
        rows=job.plan.per_rank_batch,
        accumulation=job.train.accumulate_grad_batches,
    )
