"""The simulated situations: what is true, what our rule says, what the documented rule says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.decisions import arm_cells
from benchmarks.decisions.cells import (
    LAUNCH_WARMUP,
    Cell,
    Claim,
    Result,
    Run,
    halves_differ,
    last_50,
    level_memory,
    single_above_ddp,
    told,
)
from benchmarks.decisions.noise import (
    CALM,
    NOISES,
    V4_LIKE,
    Noise,
    launch_effects,
    launched,
    launches,
    rates,
)
from runbook.config.load import load_profile
from runbook.stats import REGRESSION_PLAN, SCALING_PLAN, TARGET_PLAN, Decided
from runbook.stats.arms import regression
from runbook.stats.launches import (
    LEVEL_RUNS,
    LEVEL_WINDOW,
    below_level,
    loss_shown,
    meets_target,
    scaling,
)
from runbook.stats.series import memory_plateau, steady

# What the shipped profiles launch on each side; more than that only if a profile asks for it.
_PAIRED = load_profile("a100x2_pcie4").phases["single_gpu"]
LAUNCHED_PAIRS, PAIR_STEPS = _PAIRED.launches, _PAIRED.steps


def _target(noise: Noise, level: float, count: int, steps: int) -> Run:
    def run(rng: np.random.Generator, runs: int) -> Result:
        apart = replace(noise, shared=0.0)
        measured = level * rates(launched(rng, apart, (runs,), count, steps, LAUNCH_WARMUP))
        # The truth is the long-run throughput of this machine, pauses included.
        measured *= 1 + noise.pause_rate * (1 + noise.pause_mean)
        passed = level * last_50(launches(rng, noise, runs, 300)) >= 1.0
        decisions = [meets_target(row, 1.0) for row in measured]
        return told(decisions, errs=passed == (level < 1), steps=300.0)

    return run


def _target_cells() -> Iterator[Cell]:
    plan, under = TARGET_PLAN, (Claim("PASS", 0.05),)
    for count, steps in ((plan.units, 300 // plan.units), (LAUNCHED_PAIRS, PAIR_STEPS)):
        question = f"throughput target, {count} launches of {steps} steps"
        for noise in NOISES:
            for truth, level, claims, wrong in (
                ("2 % under", 0.98, under, "passed"),
                ("5 % under", 0.95, under, "passed"),
                ("10 % above", 1.10, (), "failed"),
            ):
                run = _target(noise, level, count, steps)
                yield Cell(question, noise, truth, run, claims, wrong, plan)


def _steady(noise: Noise, trend: float, *, every: int = 0, factor: float = 1.0) -> Run:
    """1200 steps with a trend; each `every`-th takes `factor` times as long."""

    def run(rng: np.random.Generator, runs: int) -> Result:
        times = launches(rng, noise, runs, 1200, drift=False, trend=trend)
        if every:
            times[:, every - 1 :: every] *= factor
        errs = halves_differ(times[:, 20:]) != bool(trend or every)
        return told([steady(row) for row in times], errs=errs, steps=1200.0)

    return run


def _steady_cells() -> Iterator[Cell]:
    question = "steady, 1200 steps"
    found = (Claim("PASS", 0.01),)
    for noise in NOISES:
        for percent in (5, -5):
            truth = f"drift of {percent:+d} %"
            yield Cell(question, noise, truth, _steady(noise, percent / 100), found, "missed")
        for every, factor in ((25, 1.9), (50, 1.7), (10, 1.3)):
            truth = f"a {factor}x step every {every} steps"
            stalls = _steady(noise, 0.0, every=every, factor=factor)
            yield Cell(question, noise, truth, stalls, found, "missed")
        truth, level = "level", (Claim("FAIL", 0.01),)
        if noise is CALM:
            level = (*level, Claim("INCONCLUSIVE", 0.10))
        if noise is V4_LIKE:
            truth, level = "level, but pauses take 16 % of the time", found
        yield Cell(question, noise, truth, _steady(noise, 0.0), level, "flagged")


def _memory(noise: Noise, leak: float, base: float) -> Run:
    """1200 steps: growth to the plateau within 100 steps, sawtooth of a cache, reading noise,
    and rare short spikes."""

    def run(rng: np.random.Generator, runs: int) -> Result:
        step = np.arange(1200)
        mib = base * (1 - 0.1 * np.exp(-step / 20.0)) + leak * step
        mib = mib + 24.0 * ((step[None, :] / 37.0 + rng.random((runs, 1))) % 1.0)
        mib += rng.normal(0.0, 200 * noise.step_sd, (runs, 1200))
        spikes = rng.random((runs, 1200)) < 0.002
        mib[spikes] += rng.exponential(300 * noise.step_sd, int(spikes.sum()))
        decisions = [memory_plateau(step, row, 50_000, 65_536.0) for row in mib]
        # Their reading starts where training has warmed up.
        return told(decisions, errs=level_memory(mib[:, 100:]) == (leak > 0), steps=1200.0)

    return run


def _memory_cells() -> Iterator[Cell]:
    for noise in NOISES:
        for base in (20_480.0, 50_176.0):
            question = f"memory plateau, {base / 1024:.0f} GiB"
            for leak in (0.2, 0.0):
                truth = f"leak of {leak} MiB/step" if leak else "clean allocator"
                claims = (Claim("PASS", 0.001),) if leak else (Claim("FAIL", 0.05),)
                error = "passed" if leak else "failed"
                yield Cell(question, noise, truth, _memory(noise, leak, base), claims, error)


def _scaling(noise: Noise, efficiency: float) -> Run:
    """The plan of the phase, on as many pairs as are there."""

    def run(rng: np.random.Generator, runs: int) -> Result:
        shape = (runs, LAUNCHED_PAIRS)
        rate = rates(launched(rng, noise, shape, 2, PAIR_STEPS, LAUNCH_WARMUP))
        one, many = rate[:, :, 0], 2 * efficiency * rate[:, :, 1]
        decisions = [scaling(a, b, 2, plan=SCALING_PLAN) for a, b in zip(one, many, strict=True)]
        errs = single_above_ddp(one[:, 0], many[:, 0], 2) == (efficiency <= 0.9)
        return told(decisions, errs=errs, steps_of_each=2 * PAIR_STEPS)

    return run


def _scaling_cells() -> Iterator[Cell]:
    question = f"scaling (limit 0.90), {LAUNCHED_PAIRS} pairs of {PAIR_STEPS} steps"
    own = replace(CALM, name="calm, pairs independent", shared=0.0)
    for noise in (*NOISES, own):
        for truth in (0.5, 0.88, 0.90, 0.95):
            claims: tuple[Claim, ...] = (Claim("PASS", 0.01, at_limit=truth == 0.90),)
            if truth == 0.95:
                claims = (Claim("PASS", 0.90, at_most=False),) if noise is CALM else ()
            error = "passed" if truth <= 0.90 else "failed"
            run = _scaling(noise, truth)
            yield Cell(question, noise, f"E = {truth:g}", run, claims, error, SCALING_PLAN)


_NIGHTLY_STEPS = 100


def _nightly(noise: Noise, speed: float) -> Run:
    """`FAIL` counts nights with an alarm, `caught in 3` runs of three nights with at least one."""

    def run(rng: np.random.Generator, runs: int) -> Result:
        nights = 3
        most = REGRESSION_PLAN.first + REGRESSION_PLAN.more
        length = _NIGHTLY_STEPS + LAUNCH_WARMUP
        times = launched(rng, noise, (runs * nights, most), 2, length, LAUNCH_WARMUP)
        # As the phase: tokens over the median step of each launch.
        rate = 1 / np.median(times, axis=-1)
        rate[:, :, 1] *= speed
        decisions = [regression(night[:, 0], night[:, 1]) for night in rate]
        alarm = np.array([decision.outcome is Decided.FAIL for decision in decisions])
        alarms = int(alarm[::nights].sum())
        caught = int(alarm.reshape(runs, nights).any(axis=1).sum())
        before = launches(rng, noise, runs, 200)
        drop = last_50(launches(rng, noise, runs, 200)) * speed / last_50(before)
        return Result(
            answers=Counter({"FAIL": alarms, "PASS": runs - alarms, "caught in 3": caught}),
            runs=runs,
            errs=float(((drop < 0.95) == (speed == 1)).sum()),
            steps=2 * length * sum(decision.n for decision in decisions) / nights,
        )

    return run


# Alarms that 30 nights of equal commits may have, and losses of 5 % that 3 nights have to find.
ALARMS_IN_30_NIGHTS = 0.2
FOUND_IN_3_NIGHTS = 0.98


def _nightly_cells() -> Iterator[Cell]:
    question = "nightly regression against a pinned reference"
    same = (Claim("FAIL", ALARMS_IN_30_NIGHTS / 30),)
    caught = (Claim("caught in 3", FOUND_IN_3_NIGHTS, at_most=False),)
    for noise in NOISES:
        for truth, speed, claims, error in (
            ("no change", 1.0, same, "false alarm, -5 %"),
            ("5 % slower", 0.95, caught, "missed that night"),
        ):
            run = _nightly(noise, speed)
            yield Cell(question, noise, truth, run, claims, error, REGRESSION_PLAN)


_LAUNCHES, _ALLOWED = 3, 0.05


def _earlier(noise: Noise, loss: float, before: int) -> Run:
    """A run that lost so much, against the last one, or the best level of those before it."""

    def run(rng: np.random.Generator, runs: int) -> Result:
        rate = np.exp(launch_effects(rng, noise, (runs, before + 1), _LAUNCHES))
        rate[:, -1] *= 1 - loss
        if before == 1:
            return told([loss_shown(a, b, allowance=_ALLOWED) for a, b in rate])
        means = np.exp(np.log(rate).mean(axis=-1))
        return told([below_level(one[:-1], one[-1], allowance=_ALLOWED) for one in means])

    return run


def _earlier_cells() -> Iterator[Cell]:
    for before in (1, LEVEL_RUNS, LEVEL_WINDOW):
        what = "the last run" if before == 1 else f"the best level of {before} runs"
        for noise in NOISES:
            for loss in (0.0, 0.05, 0.15, 0.30):
                claims = () if loss else (Claim("FAIL", 0.01, at_limit=True),)
                run = _earlier(noise, loss, before)
                yield Cell(f"a loss against {what}", noise, f"{loss:.0%} lost", run, claims)


def all_cells() -> list[Cell]:
    """Every situation, in the order of the published table."""
    groups = (
        arm_cells.sweep_cells,
        arm_cells.fused_cells,
        arm_cells.stalling_cells,
        arm_cells.equal_arms_cells,
        _target_cells,
        _steady_cells,
        _memory_cells,
        _scaling_cells,
        _nightly_cells,
        _earlier_cells,
        arm_cells.faster_cells,
    )
    return [cell for group in groups for cell in group()]
