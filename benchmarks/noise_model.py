"""Simulated training runs: step times with the kinds of noise that real machines show.

log(step time) = log(base) - log(speed of the arm) + launch effect + slow drift + block effect
               + AR(1) steps + warm-up, and now and then a pause stretches one step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

__all__ = ["CALM", "NOISES", "NOISY", "V4_LIKE", "FloatArray", "Noise", "blocks", "launches"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Parameters of one machine. All spreads are standard deviations of log step time."""

    name: str
    launch_sd: float  # launch to launch
    shared: float  # part of the launch variance that two launches back to back have in common
    step_sd: float  # AR(1) steps: marginal spread
    rho: float  # AR(1) steps: correlation of neighbours
    drift_sd: float  # linear drift over 600 steps, drawn once per launch
    block_sd: float  # change of pace whenever an arm is set up again
    warmup: float  # extra time of the first step of a launch or block, as a share
    warmup_tau: float  # decay of the warm-up, in steps
    pause_rate: float  # chance of a pause, per step
    pause_mean: float  # a pause adds 1 + an exponential of this mean, in step times

    def to_dict(self) -> dict[str, float | str]:
        """All parameters, JSON-able."""
        return asdict(self)


CALM = Noise(
    name="calm",
    launch_sd=0.02,
    shared=0.5,
    step_sd=0.02,
    rho=0.6,
    drift_sd=0.01,
    block_sd=0.003,
    warmup=0.3,
    warmup_tau=3.0,
    pause_rate=0.0,
    pause_mean=0.0,
)
NOISY = Noise(
    name="noisy",
    launch_sd=0.035,
    shared=0.5,
    step_sd=0.035,
    rho=0.6,
    drift_sd=0.02,
    block_sd=0.006,
    warmup=0.3,
    warmup_tau=3.0,
    pause_rate=1 / 4000,
    pause_mean=1.5,
)
# The rows of the hand-written v4 report: first steps at 70 %, about one row in five of those
# after the first at a third of the pace.
V4_LIKE = Noise(
    name="v4-like",
    launch_sd=0.05,
    shared=0.5,
    step_sd=0.06,
    rho=0.6,
    drift_sd=0.04,
    block_sd=0.01,
    warmup=0.4,
    warmup_tau=5.0,
    pause_rate=0.05,
    pause_mean=1.5,
)
NOISES = (CALM, NOISY, V4_LIKE)


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


def blocks(
    rng: np.random.Generator,
    noise: Noise,
    runs: int,
    speeds: tuple[float, ...],
    rounds: int,
    *,
    steps: int = 20,
    warmup_steps: int = 3,
) -> FloatArray:
    """Throughput [runs, rounds, arms] of arms that take turns inside one launch.

    Every round holds each arm once, in random order; each block has `warmup_steps` steps that
    are not counted and `steps` that are. A value is steps / time of the block.
    """
    arms = len(speeds)
    length = steps + warmup_steps
    order = rng.permuted(np.tile(np.arange(arms), (runs, rounds, 1)), axis=2)
    slots = rounds * arms
    log_time = _steps(rng, noise, runs, slots * length).reshape(runs, slots, length)
    log_time += rng.normal(0.0, noise.launch_sd, runs)[:, None, None]
    log_time += rng.normal(0.0, noise.block_sd, (runs, slots))[:, :, None]
    drift = rng.normal(0.0, noise.drift_sd, runs)[:, None] / 600
    log_time += (drift * np.arange(slots * length)).reshape(runs, slots, length)
    log_time -= np.log(np.asarray(speeds))[order].reshape(runs, slots, 1)
    log_time += np.log1p(noise.warmup * np.exp(-np.arange(length) / noise.warmup_tau))
    time = np.exp(log_time) * _pauses(rng, noise, runs, slots * length).reshape(log_time.shape)
    rate = (steps / time[:, :, warmup_steps:].sum(axis=2)).reshape(runs, rounds, arms)
    return np.take_along_axis(rate, np.argsort(order, axis=2), axis=2)


def launch_effects(
    rng: np.random.Generator, noise: Noise, shape: tuple[int, ...], members: int
) -> FloatArray:
    """Log effects [*shape, members] of launches that run back to back in groups of `members`."""
    common = rng.normal(0.0, noise.launch_sd * noise.shared**0.5, (*shape, 1))
    own = rng.normal(0.0, noise.launch_sd * (1 - noise.shared) ** 0.5, (*shape, members))
    return common + own


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
