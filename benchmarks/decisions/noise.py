"""Simulated training runs: step times with the kinds of noise that real machines show.

log(step time) = log(base) - log(speed of the arm) + launch effect + slow drift + block effect
               + AR(1) steps + warm-up + neighbor, and now and then a pause stretches one step.

The neighbor is a busy loop on one core that comes and goes: while it runs, every step is slower
and more erratic, whichever arm has its turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from runbook.stats import balanced_rounds

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Parameters of one machine, calm unless told otherwise.

    All spreads are standard deviations of log step time.
    """

    name: str
    launch_sd: float = 0.02  # launch to launch
    shared: float = 0.5  # part of the launch variance that two launches back to back share
    step_sd: float = 0.02  # AR(1) steps: marginal spread
    rho: float = 0.6  # AR(1) steps: correlation of neighbours
    drift_sd: float = 0.01  # linear drift over 600 steps, drawn once per launch
    block_sd: float = 0.003  # change of pace whenever an arm is set up again
    warmup: float = 0.3  # extra time of the first step of a launch or block, as a share
    warmup_tau: float = 3.0  # decay of the warm-up, in steps
    pause_rate: float = 0.0  # chance of a pause, per step
    pause_mean: float = 0.0  # a pause adds 1 + an exponential of this mean, in step times
    neighbor_slow: float = 0.0  # extra time of a step while the neighbor runs, as a share
    neighbor_sd: float = 0.0  # and its spread from step to step
    neighbor_low_s: float = 0.5  # shortest and longest time that the neighbor stays or is away
    neighbor_high_s: float = 20.0
    step_s: float = 0.05  # a step without it


CALM = Noise(name="calm")
NOISY = Noise(
    name="noisy",
    launch_sd=0.035,
    step_sd=0.035,
    drift_sd=0.02,
    block_sd=0.006,
    pause_rate=1 / 4000,
    pause_mean=1.5,
)
# The rows of the hand-written v4 report: first steps at 70 %, about one row in five of those
# after the first at a third of the pace.
V4_LIKE = Noise(
    name="v4-like",
    launch_sd=0.05,
    step_sd=0.06,
    drift_sd=0.04,
    block_sd=0.01,
    warmup=0.4,
    warmup_tau=5.0,
    pause_rate=0.05,
    pause_mean=1.5,
)
NOISES = (CALM, NOISY, V4_LIKE)
# Two ranks on two cores, one of which a busy loop takes a share of: seen are steps of 1.3 to 1.6
# times. With few and quick ones the decision is hardest, so both are simulated.
BESIDE_NEIGHBOR = replace(NOISY, name="neighbor", neighbor_slow=0.4, neighbor_sd=0.10)
LIGHT_NEIGHBOR = replace(NOISY, name="light neighbor", neighbor_slow=0.1, neighbor_sd=0.02)
NEIGHBORS = (BESIDE_NEIGHBOR, LIGHT_NEIGHBOR)


def launches(
    rng: np.random.Generator,
    noise: Noise,
    runs: int,
    steps: int,
    *,
    launch_effect: FloatArray | None = None,
    drift: bool = True,
    trend: float = 0.0,
) -> FloatArray:
    """Step times [runs, steps] of independent launches at pace 1.

    Args:
        rng: random numbers.
        noise: the machine.
        runs: number of launches.
        steps: steps of each.
        launch_effect: log effects [runs]; drawn from `noise` if None.
        drift: False for a run that is stationary but for its warm-up.
        trend: change of log step time over the whole run, the same for all.
    """
    if launch_effect is None:
        launch_effect = rng.normal(0.0, noise.launch_sd, runs)
    log_time = _steps(rng, noise, runs, steps)
    log_time += launch_effect[:, None]
    ramp = np.linspace(-0.5, 0.5, steps)
    slope = rng.normal(0.0, noise.drift_sd, runs) * steps / 600 if drift else np.zeros(runs)
    log_time += (slope + trend)[:, None] * ramp
    log_time += np.log1p(noise.warmup * np.exp(-np.arange(steps) / noise.warmup_tau))
    return np.exp(log_time) * _pauses(rng, noise, runs, steps)


def block_times(
    rng: np.random.Generator,
    noise: Noise,
    runs: int,
    speeds: tuple[float, ...],
    rounds: int,
    *,
    steps: int = 20,
    warmup_steps: int = 3,
    stall_share: float = 0.0,
    stall_steps: float = 0.0,
) -> FloatArray:
    """Times [runs, rounds, arms, steps] of the counted steps of arms that take turns.

    The order is the one of the phases (`balanced_rounds`); each block has `warmup_steps` steps
    that are not counted and `steps` that are. The last arm stalls in `stall_share` of its rounds
    for `stall_steps` step times.
    """
    arms = len(speeds)
    length = steps + warmup_steps
    order = _orders(rng, runs, arms, rounds)
    slots = rounds * arms
    log_time = _steps(rng, noise, runs, slots * length).reshape(runs, slots, length)
    log_time += rng.normal(0.0, noise.launch_sd, runs)[:, None, None]
    log_time += rng.normal(0.0, noise.block_sd, (runs, slots))[:, :, None]
    drift = rng.normal(0.0, noise.drift_sd, runs)[:, None] / 600
    log_time += (drift * np.arange(slots * length)).reshape(runs, slots, length)
    log_time -= np.log(np.asarray(speeds))[order].reshape(runs, slots, 1)
    log_time += np.log1p(noise.warmup * np.exp(-np.arange(length) / noise.warmup_tau))
    time = np.exp(log_time) * _pauses(rng, noise, runs, slots * length).reshape(log_time.shape)
    if noise.neighbor_slow:
        time *= _neighbor(rng, noise, runs, slots * length).reshape(log_time.shape)
    time = time[:, :, warmup_steps:].reshape(runs, rounds, arms, steps)
    place = np.argsort(order, axis=2)[:, :, :, None]
    time = np.take_along_axis(time, place, axis=2)
    if stall_share:
        stalled = rng.random((runs, rounds)) < stall_share
        where = rng.integers(0, steps, (runs, rounds))
        run, turn = np.nonzero(stalled)
        time[run, turn, arms - 1, where[run, turn]] += stall_steps
    return time


def rates(times: FloatArray) -> FloatArray:
    """Throughput [..., arms] of blocks whose steps took `times` [..., arms, steps]."""
    return times.shape[-1] / times.sum(axis=-1)


def _orders(rng: np.random.Generator, runs: int, arms: int, rounds: int) -> npt.NDArray[np.int64]:
    """Which arm has each turn: [runs, rounds, arms], as a phase would plan it."""
    seeds = rng.integers(0, 2**62, runs)
    orders = [balanced_rounds(range(arms), rounds, Random(int(seed))) for seed in seeds]
    return np.array(orders, dtype=np.int64)


def launch_effects(
    rng: np.random.Generator, noise: Noise, shape: tuple[int, ...], members: int
) -> FloatArray:
    """Log effects [*shape, members] of launches that run back to back in groups of `members`."""
    common = rng.normal(0.0, noise.launch_sd * noise.shared**0.5, (*shape, 1))
    own = rng.normal(0.0, noise.launch_sd * (1 - noise.shared) ** 0.5, (*shape, members))
    return common + own


def launched(
    rng: np.random.Generator,
    noise: Noise,
    shape: tuple[int, ...],
    members: int,
    steps: int,
    warmup_steps: int,
) -> FloatArray:
    """Times [*shape, members, counted steps] of launches back to back in groups of `members`."""
    effects = launch_effects(rng, noise, shape, members)
    times = launches(rng, noise, effects.size, steps, launch_effect=effects.ravel())
    return times[:, warmup_steps:].reshape(*effects.shape, -1)


def _steps(rng: np.random.Generator, noise: Noise, runs: int, steps: int) -> FloatArray:
    """AR(1) with marginal spread `step_sd`, started in its stationary state."""
    shocks = rng.normal(0.0, noise.step_sd * (1 - noise.rho**2) ** 0.5, (runs, steps))
    shocks[:, 0] = rng.normal(0.0, noise.step_sd, runs)
    series: FloatArray = lfilter([1.0], [1.0, -noise.rho], shocks, axis=1)
    return series


def _pauses(rng: np.random.Generator, noise: Noise, runs: int, steps: int) -> FloatArray:
    """Factors [runs, steps]: 1, or more where the step holds a pause."""
    factor = np.ones((runs, steps))
    hit = rng.random((runs, steps)) < noise.pause_rate
    factor[hit] += 1.0 + rng.exponential(noise.pause_mean, int(hit.sum()))
    return factor


def _neighbor(rng: np.random.Generator, noise: Noise, runs: int, steps: int) -> FloatArray:
    """Factors [runs, steps] of a neighbor that comes and goes.

    In half of the runs it keeps one period, which may fall in with the turns of the arms; in the
    others each stay has a length of its own (log-uniform).
    """
    on = 1.0 + noise.neighbor_slow
    count = int(steps * noise.step_s * on / noise.neighbor_low_s) + 4
    stretch = rng.random((runs, count))
    stretch[: runs // 2] = stretch[: runs // 2, :1]
    stays = noise.neighbor_low_s * (noise.neighbor_high_s / noise.neighbor_low_s) ** stretch
    there = (np.arange(count)[None, :] + rng.integers(0, 2, (runs, 1))) % 2 == 1
    in_steps = stays / noise.step_s / np.where(there, on, 1.0)
    in_steps[:, 0] *= rng.random(runs)
    ends = np.minimum(np.cumsum(in_steps, axis=1).astype(np.int64), steps)
    flips = np.zeros((runs, steps + 1), dtype=np.int64)
    np.add.at(flips, (np.arange(runs)[:, None], ends), 1)
    busy = (np.cumsum(flips, axis=1)[:, :steps] + there[:, :1]) % 2 == 1
    extra = np.log(on) + rng.normal(0.0, noise.neighbor_sd, (runs, steps))
    factor: FloatArray = np.exp(np.where(busy, extra, 0.0))
    return factor
