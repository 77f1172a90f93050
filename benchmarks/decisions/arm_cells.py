"""The simulated comparisons of arms: the sweep, fused AdamW, and equal arms under two names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from benchmarks.decisions.cells import (
    BLOCK_STEPS,
    BLOCK_WARMUP,
    LAUNCH_STEPS,
    LAUNCH_WARMUP,
    Cell,
    Claim,
    Result,
    count,
    keep_fused,
    last_50,
)
from benchmarks.decisions.noise import (
    CALM,
    NEIGHBORS,
    NOISES,
    NOISY,
    V4_LIKE,
    FloatArray,
    Noise,
    block_times,
    launch_effects,
    rates,
)
from benchmarks.decisions.noise import launches as simulate
from runbook.config.load import load_profile
from runbook.stats.arms import judge_rounds_so_far
from runbook.stats.pairs import non_inferiority
from runbook.stats.plans import (
    AA_PLAN,
    BUCKET_LAUNCHES_PLAN,
    BUCKET_PLAN,
    FUSED_LAUNCHES_PLAN,
    FUSED_PLAN,
)

ARMS = ("25", "50", "100")
# The noisy machine with steps so erratic that 600 steps allow a standard error of 1.1 %.
EDGE = replace(NOISY, name="edge", step_sd=0.0425)


def _documented_winner(
    rng: np.random.Generator, noise: Noise, runs: int, speeds: tuple[float, ...]
) -> FloatArray:
    """Index of the highest last-50 mean, one launch of 200 steps per arm."""
    effects = launch_effects(rng, noise, (runs,), len(speeds))
    rates = [
        speed * last_50(simulate(rng, noise, runs, 200, launch_effect=effects[:, arm]))
        for arm, speed in enumerate(speeds)
    ]
    return np.argmax(np.stack(rates), axis=0)


_SWEEP_PLANS = {"blocks": BUCKET_PLAN, "launches": BUCKET_LAUNCHES_PLAN}


def _sweep(
    noise: Noise, speeds: tuple[float, ...], protocol: str
) -> Callable[[np.random.Generator, int], Result]:
    plan = _SWEEP_PLANS[protocol]
    steps = len(speeds) * (BLOCK_STEPS + BLOCK_WARMUP)
    if protocol != "blocks":
        steps = len(speeds) * (LAUNCH_STEPS + LAUNCH_WARMUP)
    top = max(speeds)
    best = ARMS[speeds.index(top)] if speeds.count(top) == 1 else None

    def run(rng: np.random.Generator, runs: int) -> Result:
        values, times = _values(rng, noise, runs, speeds, plan.max_rounds, protocol)
        decisions = [
            judge_rounds_so_far(ARMS, one, plan=plan, steps=each)
            for one, each in zip(values, times, strict=True)
        ]
        budget = 600 // steps
        gaps = np.log(values[:, :budget, 0] / values[:, :budget, 2]).mean(axis=1)
        picks = _documented_winner(rng, noise, runs, speeds)
        right = best is not None and picks == ARMS.index(best)
        return Result(
            answers=count(decisions, best),
            runs=runs,
            documented_rule=1.0 - float(np.mean(right)),
            steps=steps * float(np.mean([decision.n for decision in decisions])),
            extra={"standard_error_600_steps": float(gaps.std())},
        )

    return run


def _values(
    rng: np.random.Generator,
    noise: Noise,
    runs: int,
    speeds: tuple[float, ...],
    rounds: int,
    protocol: str,
) -> tuple[FloatArray, FloatArray | list[None]]:
    """Throughput [runs, rounds, arms], and the steps of each run's blocks."""
    if protocol == "blocks":
        times = block_times(
            rng, noise, runs, speeds, rounds, steps=BLOCK_STEPS, warmup_steps=BLOCK_WARMUP
        )
        return rates(times), times
    effects = launch_effects(rng, noise, (runs, rounds), len(speeds))
    length = LAUNCH_STEPS + LAUNCH_WARMUP
    times = simulate(rng, noise, effects.size, length, launch_effect=effects.ravel())
    rate = LAUNCH_STEPS / times[:, LAUNCH_WARMUP:].sum(axis=1)
    return rate.reshape(effects.shape) * np.asarray(speeds), [None] * runs


def sweep_cells() -> Iterator[Cell]:
    truths = {
        "all equal": (1.0, 1.0, 1.0),
        "two equal, one 5 % worse": (1.0, 1.0, 0.95),
        "one 2 % better": (1.0, 1.02, 1.0),
        "one 5 % better": (1.0, 1.05, 1.0),
    }
    for protocol, noises in (
        ("blocks", (CALM, NOISY, EDGE, V4_LIKE, *NEIGHBORS)),
        ("launches", NOISES),
    ):
        for noise in noises:
            for truth, speeds in truths.items():
                claims: tuple[Claim, ...] = (Claim("wrong", 0.01),)
                if max(speeds) == 1.05:
                    power = Claim("right", 0.99, at_most=False, when=_precise)
                    claims = (*claims, power)
                question = f"best arm, {protocol}"
                run = _sweep(noise, speeds, protocol)
                error = "some winner" if speeds.count(1.0) > 1 and max(speeds) == 1 else "wrong arm"
                plan = _SWEEP_PLANS[protocol]
                yield Cell(question, noise, truth, run, claims, error, plan)


def _precise(result: Result) -> bool:
    """Power is promised only where 600 steps allow a standard error of at most 1.1 %."""
    return result.extra["standard_error_600_steps"] <= 0.011


_FUSED_PLANS = {"blocks": FUSED_PLAN, "launches": FUSED_LAUNCHES_PLAN}


def _fused(
    noise: Noise, speed: float, protocol: str = "blocks"
) -> Callable[[np.random.Generator, int], Result]:
    plan = _FUSED_PLANS[protocol]
    steps = BLOCK_STEPS + BLOCK_WARMUP if protocol == "blocks" else LAUNCH_STEPS + LAUNCH_WARMUP

    def run(rng: np.random.Generator, runs: int) -> Result:
        values, times = _values(rng, noise, runs, (1.0, speed), plan.max_rounds, protocol)
        decisions = [
            non_inferiority(v[:, 0], v[:, 1], plan=plan, steps=each)
            for v, each in zip(values, times, strict=True)
        ]
        effects = launch_effects(rng, noise, (runs,), 2)
        plain, fused = (
            simulate(rng, noise, runs, 200, launch_effect=effects[:, arm]) for arm in (0, 1)
        )
        kept = float(np.mean(keep_fused(plain, fused / speed)))
        mean_rounds = float(np.mean([decision.n for decision in decisions]))
        return Result(
            answers=count(decisions),
            runs=runs,
            documented_rule=kept if speed < 1 else 1 - kept,
            steps=2 * steps * mean_rounds,
        )

    return run


def fused_cells() -> Iterator[Cell]:
    question = "fused AdamW (margin 2 %)"
    # A loss of 2.5 margins: where the second bound of KEEP has its error.
    slow = (Claim("KEEP", 0.001, at_limit=True),)
    edge = (Claim("KEEP", 0.05, at_limit=True),)
    for noise in (*NOISES, *NEIGHBORS):
        same: tuple[Claim, ...] = (Claim("DROP", 0.05),)
        if noise in (CALM, NOISY):
            same = (*same, Claim("KEEP", 0.90, at_most=False))
        if noise in NEIGHBORS:
            same = (Claim("DROP", 0.005),)
        for truth, speed, claims, error in (
            ("5 % slower", 0.95, slow, "kept"),
            ("2 % slower: at the margin", 0.98, edge, "kept"),
            ("equal", 1.0, same, "dropped"),
        ):
            yield Cell(question, noise, truth, _fused(noise, speed), claims, error, FUSED_PLAN)
    for noise in NOISES:
        for truth, speed, claims, error in (
            ("5 % slower", 0.95, (Claim("KEEP", 0.01),), "kept"),
            ("equal", 1.0, (Claim("DROP", 0.05),), "dropped"),
        ):
            run = _fused(noise, speed, "launches")
            launched = f"{question}, launches"
            yield Cell(launched, noise, truth, run, claims, error, FUSED_LAUNCHES_PLAN)


def _stalling(noise: Noise, stall_steps: float) -> Callable[[np.random.Generator, int], Result]:
    """The variant loses so many step times at once in a tenth of its rounds, else it is equal."""
    plan = FUSED_PLAN

    def run(rng: np.random.Generator, runs: int) -> Result:
        times = block_times(
            rng, noise, runs, (1.0, 1.0), plan.max_rounds,
            steps=BLOCK_STEPS, warmup_steps=BLOCK_WARMUP, stall_share=0.1, stall_steps=stall_steps,
        )  # fmt: skip
        decisions = [
            non_inferiority(v[:, 0], v[:, 1], plan=plan, steps=each)
            for v, each in zip(rates(times), times, strict=True)
        ]
        rounds = float(np.mean([decision.n for decision in decisions]))
        steps = 2 * (BLOCK_STEPS + BLOCK_WARMUP) * rounds
        return Result(answers=count(decisions), runs=runs, steps=steps)

    return run


def stalling_cells() -> Iterator[Cell]:
    question = "fused AdamW that stalls in a tenth of its rounds"
    for noise in (CALM, NOISY):
        for steps in (6.0, 10.0, 40.0):
            truth = f"for {steps:.0f} steps, {steps / 2:.0f} % of its time"
            claims = (Claim("KEEP", 0.08),)
            yield Cell(question, noise, truth, _stalling(noise, steps), claims, plan=FUSED_PLAN)


# Rounds and steps of a block of the two comparisons on the CPU profile, which cuts the plan off.
def _cut_off(phase: str) -> tuple[int, int, int]:
    settings = load_profile("cpu").phases[phase]
    return settings.rounds, settings.steps, settings.warmup


def _equal_arms(
    noise: Noise, rounds: int, steps: int, warmup: int
) -> Callable[[np.random.Generator, int], Result]:
    """`alarm` is a difference found between equal arms, whichever looks better."""

    def run(rng: np.random.Generator, runs: int) -> Result:
        times = block_times(rng, noise, runs, (1.0, 1.0), rounds, steps=steps, warmup_steps=warmup)
        decisions = [
            judge_rounds_so_far(ARMS[:2], v, plan=AA_PLAN, final=True, steps=each)
            for v, each in zip(rates(times), times, strict=True)
        ]
        answers = count(decisions)
        answers["alarm"] = answers.pop("wrong", 0)
        used = float(np.mean([decision.n for decision in decisions]))
        return Result(answers=answers, runs=runs, steps=2 * (steps + warmup) * used)

    return run


def equal_arms_cells() -> Iterator[Cell]:
    sizes = {
        f"A/A, up to {AA_PLAN.max_rounds} rounds": (AA_PLAN.max_rounds, BLOCK_STEPS, BLOCK_WARMUP),
        "A/A of fused AdamW on the CPU profile": _cut_off("fused_adamw"),
        "A/A of the sweep on the CPU profile": _cut_off("bucket_sweep"),
    }
    for question, size in sizes.items():
        for noise in (*NOISES, *NEIGHBORS):
            run = _equal_arms(noise, *size)
            yield Cell(question, noise, "equal", run, (Claim("alarm", 0.01),), plan=AA_PLAN)
