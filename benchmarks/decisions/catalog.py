"""The simulated situations: what is true, what our rule says, what the documented rule says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from benchmarks.decisions.arm_cells import (
    equal_arms_cells,
    fused_cells,
    stalling_cells,
    sweep_cells,
)
from benchmarks.decisions.cells import (
    BLOCK_STEPS,
    BLOCK_WARMUP,
    LAUNCH_WARMUP,
    Cell,
    Claim,
    Result,
    count,
    halves_differ,
    last_50,
    level_memory,
    single_above_ddp,
)
from benchmarks.decisions.noise import (
    CALM,
    NOISES,
    V4_LIKE,
    Noise,
    block_times,
    launch_effects,
    rates,
)
from benchmarks.decisions.noise import launches as simulate
from runbook.config.load import load_profile
from runbook.stats.decision import Decided
from runbook.stats.launches import meets_target, scaling, scaling_over
from runbook.stats.memory import memory_plateau
from runbook.stats.pairs import faster, regression
from runbook.stats.plans import FASTER_PLAN, REGRESSION_PLAN, SCALING_PLAN, TARGET_PLAN
from runbook.stats.steady import steady

__all__ = ["Cell", "Claim", "Result", "all_cells"]


# What the shipped profiles launch on each side; more than that only if a profile asks for it.
_PAIRED = load_profile("a100x2_pcie4").phases["single_gpu"]
LAUNCHED_PAIRS, PAIR_STEPS = _PAIRED.launches, _PAIRED.steps


def _target(
    noise: Noise, level: float, launched: int, steps: int
) -> Callable[[np.random.Generator, int], Result]:
    def run(rng: np.random.Generator, runs: int) -> Result:
        effects = launch_effects(rng, replace(noise, shared=0.0), (runs,), launched).ravel()
        times = simulate(rng, noise, launched * runs, steps, launch_effect=effects)
        times = times[:, LAUNCH_WARMUP:]
        measured = level * times.shape[1] / times.sum(axis=1).reshape(runs, launched)
        # The truth is the long-run throughput of this machine, pauses included.
        measured *= 1 + noise.pause_rate * (1 + noise.pause_mean)
        once = simulate(rng, noise, runs, 300)
        passed = float(np.mean(level * last_50(once) >= 1.0))
        return Result(
            answers=count([meets_target(row, 1.0, plan=TARGET_PLAN) for row in measured]),
            runs=runs,
            documented_rule=passed if level < 1 else 1 - passed,
            steps=300.0,
        )

    return run


def _target_cells() -> Iterator[Cell]:
    plan, under = TARGET_PLAN, (Claim("PASS", 0.05),)
    for launched, steps in ((plan.units, 300 // plan.units), (LAUNCHED_PAIRS, PAIR_STEPS)):
        question = f"throughput target, {launched} launches of {steps} steps"
        for noise in NOISES:
            for truth, level, claims, wrong in (
                ("2 % under", 0.98, under, "passed"),
                ("5 % under", 0.95, under, "passed"),
                ("10 % above", 1.10, (), "failed"),
            ):
                run = _target(noise, level, launched, steps)
                yield Cell(question, noise, truth, run, claims, wrong, plan)


def _steady(
    noise: Noise, trend: float, *, every: int = 0, factor: float = 1.0
) -> Callable[[np.random.Generator, int], Result]:
    """1200 steps with a trend; each `every`-th takes `factor` times as long."""

    def run(rng: np.random.Generator, runs: int) -> Result:
        times = simulate(rng, noise, runs, 1200, drift=False, trend=trend)
        if every:
            times[:, every - 1 :: every] *= factor
        flagged = float(np.mean(halves_differ(times[:, 20:])))
        return Result(
            answers=count([steady(row) for row in times]),
            runs=runs,
            documented_rule=1 - flagged if trend or every else flagged,
            steps=1200.0,
        )

    return run


def _steady_cells() -> Iterator[Cell]:
    question = "steady, 1200 steps"
    for noise in NOISES:
        for percent in (5, -5):
            truth = f"drift of {percent:+d} %"
            claims = (Claim("PASS", 0.01),)
            yield Cell(question, noise, truth, _steady(noise, percent / 100), claims, "missed")
        for every, factor in ((25, 1.9), (50, 1.7), (10, 1.3)):
            truth = f"a {factor}x step every {every} steps"
            found = (Claim("PASS", 0.01),)
            stalls = _steady(noise, 0.0, every=every, factor=factor)
            yield Cell(question, noise, truth, stalls, found, "missed")
        level: tuple[Claim, ...] = (Claim("FAIL", 0.01),)
        if noise is CALM:
            level = (*level, Claim("INCONCLUSIVE", 0.10))
        if noise is V4_LIKE:
            yield Cell(
                question, noise, "level, but pauses take 16 % of the time", _steady(noise, 0.0),
                (Claim("PASS", 0.01),), "flagged",
            )  # fmt: skip
        else:
            yield Cell(question, noise, "level", _steady(noise, 0.0), level, "flagged")


def _memory(noise: Noise, leak: float, base: float) -> Callable[[np.random.Generator, int], Result]:
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
        level = float(np.mean(level_memory(mib[:, 100:])))
        wrong = level if leak else 1 - level
        return Result(answers=count(decisions), runs=runs, documented_rule=wrong, steps=1200.0)

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


def _scaling(noise: Noise, efficiency: float) -> Callable[[np.random.Generator, int], Result]:
    """The plan of the phase, on as many pairs as are there."""

    def run(rng: np.random.Generator, runs: int) -> Result:
        effects = launch_effects(rng, noise, (runs, LAUNCHED_PAIRS), 2)
        times = simulate(rng, noise, effects.size, PAIR_STEPS, launch_effect=effects.ravel())
        times = times[:, LAUNCH_WARMUP:]
        rate = (times.shape[1] / times.sum(axis=1)).reshape(effects.shape)
        one, many = rate[:, :, 0], 2 * efficiency * rate[:, :, 1]
        decisions = [scaling(a, b, 2, plan=SCALING_PLAN) for a, b in zip(one, many, strict=True)]
        above = float(np.mean(single_above_ddp(one[:, 0], many[:, 0], 2)))
        used = float(np.mean([decision.n for decision in decisions]))
        wrong = above if efficiency <= 0.9 else 1 - above
        return Result(
            answers=count(decisions), runs=runs, documented_rule=wrong, steps=2 * PAIR_STEPS * used
        )

    return run


def _scaling_cells() -> Iterator[Cell]:
    question = f"scaling (limit 0.90), {LAUNCHED_PAIRS} pairs of {PAIR_STEPS} steps"
    own = replace(CALM, name="calm, pairs independent", shared=0.0)
    for noise in (*NOISES, own):
        for truth in (0.5, 0.88, 0.90, 0.95):
            claims: tuple[Claim, ...] = (Claim("PASS", 0.01, at_limit=truth == 0.90),)
            if truth == 0.95:
                claims = (Claim("PASS", 0.90, at_most=False),) if noise is CALM else ()
            seed = "passed" if truth <= 0.90 else "failed"
            truth_text = "E = 0.9" if truth == 0.90 else f"E = {truth}"
            yield Cell(
                question, noise, truth_text, _scaling(noise, truth), claims, seed, SCALING_PLAN
            )


_NODES = (2, 4, 8)


def _over_nodes(
    noise: Noise, efficiencies: tuple[float, ...]
) -> Callable[[np.random.Generator, int], Result]:
    """`PASS` counts runs in which each number of nodes passes; else the worst answer counts."""

    def run(rng: np.random.Generator, runs: int) -> Result:
        effects = launch_effects(rng, noise, (runs, LAUNCHED_PAIRS), 1 + len(_NODES))
        times = simulate(rng, noise, effects.size, PAIR_STEPS, launch_effect=effects.ravel())
        times = times[:, LAUNCH_WARMUP:]
        rate = (times.shape[1] / times.sum(axis=1)).reshape(effects.shape)
        truth = [n * one for n, one in zip(_NODES, efficiencies, strict=True)]
        rate[:, :, 1:] *= np.array(truth)
        answers: Counter[str] = Counter()
        for one in rate:
            more = {n: one[:, place] for place, n in enumerate(_NODES, start=1)}
            found = scaling_over(one[:, 0], more, plan=SCALING_PLAN).values()
            worst = min(found, key=lambda decision: decision.outcome.as_check.rank)
            answers[worst.outcome.value] += 1
        steps = (1 + len(_NODES)) * PAIR_STEPS * LAUNCHED_PAIRS
        return Result(answers=answers, runs=runs, steps=float(steps))

    return run


def _over_nodes_cells() -> Iterator[Cell]:
    numbers = ", ".join(map(str, _NODES))
    question = f"scaling over {numbers} nodes (limit 0.90), {LAUNCHED_PAIRS} rounds"
    no: tuple[Claim, ...] = (Claim("PASS", 0.01),)
    for noise in NOISES:
        for truth, efficiencies, claims in (
            ("E = 0.98, 0.96, 0.85", (0.98, 0.96, 0.85), no),
            ("E = 0.9 of each", (0.9, 0.9, 0.9), (*no, Claim("FAIL", 0.01, at_limit=True))),
            ("E = 0.98, 0.97, 0.96", (0.98, 0.97, 0.96), (Claim("FAIL", 0.01),)),
        ):
            run = _over_nodes(noise, efficiencies)
            yield Cell(question, noise, truth, run, claims, plan=SCALING_PLAN)


_NIGHTLY_STEPS = 100


def _nightly(noise: Noise, speed: float) -> Callable[[np.random.Generator, int], Result]:
    """`FAIL` counts nights with an alarm, `caught in 3` runs of three nights with at least one."""

    def run(rng: np.random.Generator, runs: int) -> Result:
        nights = 3
        most = REGRESSION_PLAN.first + REGRESSION_PLAN.more
        effects = launch_effects(rng, noise, (runs * nights, most), 2)
        length = _NIGHTLY_STEPS + LAUNCH_WARMUP
        times = simulate(rng, noise, effects.size, length, launch_effect=effects.ravel())
        # As the phase: tokens over the median step of each launch.
        rate = (1 / np.median(times[:, LAUNCH_WARMUP:], axis=1)).reshape(effects.shape)
        rate[:, :, 1] *= speed
        decisions = [regression(night[:, 0], night[:, 1], REGRESSION_PLAN) for night in rate]
        alarm = np.array([decision.outcome is Decided.FAIL for decision in decisions])
        caught = int(alarm.reshape(runs, nights).any(axis=1).sum())
        every = Counter({"FAIL": int(alarm[::nights].sum()), "caught in 3": caught})
        every["PASS"] = runs - every["FAIL"]
        before = simulate(rng, noise, runs, 200)
        drop = last_50(simulate(rng, noise, runs, 200)) * speed / last_50(before)
        rounds = float(np.mean([decision.n for decision in decisions]))
        flagged = float(np.mean(drop < 0.95))
        return Result(
            answers=every,
            runs=runs,
            documented_rule=flagged if speed == 1 else 1 - flagged,
            steps=2 * length * rounds,
            extra={"alarms_in_30_nights": 30 * float(alarm.mean())},
        )

    return run


# Alarms that 30 nights of equal commits may have, and losses of 5 % that 3 nights have to find.
ALARMS_IN_30_NIGHTS = 0.2
FOUND_IN_3_NIGHTS = 0.98


def _nightly_cells() -> Iterator[Cell]:
    question = "nightly regression against a pinned reference"
    for noise in NOISES:
        same = (Claim("FAIL", ALARMS_IN_30_NIGHTS / 30),)
        same_run, slow_run = _nightly(noise, 1.0), _nightly(noise, 0.95)
        alarm, missed = "false alarm, -5 %", "missed that night"
        yield Cell(question, noise, "no change", same_run, same, alarm, REGRESSION_PLAN)
        caught = (Claim("caught in 3", FOUND_IN_3_NIGHTS, at_most=False),)
        yield Cell(question, noise, "5 % slower", slow_run, caught, missed, REGRESSION_PLAN)


def _faster(noise: Noise, speed: float) -> Callable[[np.random.Generator, int], Result]:
    def run(rng: np.random.Generator, runs: int) -> Result:
        values = rates(block_times(rng, noise, runs, (1.0, speed), FASTER_PLAN.units))
        return Result(
            answers=count([faster(v[:, 1], v[:, 0], FASTER_PLAN.error) for v in values]),
            runs=runs,
            steps=FASTER_PLAN.units * 2.0 * (BLOCK_STEPS + BLOCK_WARMUP),
        )

    return run


def _faster_cells() -> Iterator[Cell]:
    plan = FASTER_PLAN
    question = f"v2 faster, {plan.units} rounds"
    for noise in NOISES:
        no = (Claim("PASS", plan.error, at_limit=True),)
        yield Cell(question, noise, "equal", _faster(noise, 1.0), no, plan=plan)
        yes = () if noise is V4_LIKE else (Claim("PASS", 0.99, at_most=False),)
        yield Cell(question, noise, "10 % faster", _faster(noise, 1.10), yes, plan=plan)


def all_cells() -> list[Cell]:
    """Every situation, in the order of the published table."""
    groups = (
        sweep_cells,
        fused_cells,
        stalling_cells,
        equal_arms_cells,
        _target_cells,
        _steady_cells,
        _memory_cells,
        _scaling_cells,
        _over_nodes_cells,
        _nightly_cells,
        _faster_cells,
    )
    return [cell for group in groups for cell in group()]
