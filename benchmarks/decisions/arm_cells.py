"""The simulated comparisons of arms: the sweep, fused AdamW, and equal arms under two names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.decisions.cells import (
    BLOCK_STEPS,
    BLOCK_WARMUP,
    FASTER_PLAN,
    LAUNCH_STEPS,
    LAUNCH_WARMUP,
    Cell,
    Claim,
    Result,
    Run,
    keep_fused,
    last_50,
    told,
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
    launched,
    launches,
    rates,
)
from nsa.tests.test_performance_guards import lower_bound
from runbook.config.load import load_profile
from runbook.stats import (
    AA_PLAN,
    BUCKET_LAUNCHES_PLAN,
    BUCKET_PLAN,
    FUSED_LAUNCHES_PLAN,
    FUSED_PLAN,
    Decided,
    Decision,
    InterimPlan,
)
from runbook.stats.arms import best_arm_sequential, non_inferiority

ARMS = ("25", "50", "100")
# The noisy machine with steps so erratic that 600 steps allow a standard error of 1.1 %.
EDGE = replace(NOISY, name="edge", step_sd=0.0425)
# Throughput [rounds, arms], and in blocks the time of each step.
Decide = Callable[[FloatArray, Any], Decision]


def _arms(
    noise: Noise,
    speeds: tuple[float, ...],
    decide: Decide,
    rounds: int,
    *,
    launch: bool = False,
    steps: int = BLOCK_STEPS,
    warmup: int = BLOCK_WARMUP,
    best: str | None = None,
    wrong: str = "wrong",
    documented: Callable[[list[FloatArray]], npt.NDArray[np.bool_]] | None = None,
    **stalls: float,
) -> Run:
    """Arms that take turns in so many rounds: blocks of one launch, or launches of their own.

    documented: the runs in which the documented rule errs, by 200 steps of a launch of each arm.
    """

    def run(rng: np.random.Generator, runs: int) -> Result:
        each: Any = [None] * runs
        if launch:
            length = LAUNCH_STEPS + LAUNCH_WARMUP
            times = launched(rng, noise, (runs, rounds), len(speeds), length, LAUNCH_WARMUP)
            values = rates(times) * np.asarray(speeds)
        else:
            length = steps + warmup
            each = block_times(
                rng, noise, runs, speeds, rounds, steps=steps, warmup_steps=warmup, **stalls
            )
            values = rates(each)
        decisions = [decide(one, of) for one, of in zip(values, each, strict=True)]
        budget = 600 // (len(speeds) * length)
        gaps = np.log(values[:, :budget, 0] / values[:, :budget, -1]).mean(axis=1)
        errs = None
        if documented is not None:
            effects = launch_effects(rng, noise, (runs,), len(speeds))
            errs = documented([
                launches(rng, noise, runs, 200, launch_effect=effects[:, arm]) / speed
                for arm, speed in enumerate(speeds)
            ])  # fmt: skip
        return told(
            decisions,
            steps_of_each=len(speeds) * length,
            errs=errs,
            best=best,
            wrong=wrong,
            variance=float(gaps.var()),
        )

    return run


def _picks_wrongly(best: int | None) -> Callable[[list[FloatArray]], npt.NDArray[np.bool_]]:
    """The documented rule takes the highest last-50 mean, and so always some arm."""

    def errs(times: list[FloatArray]) -> npt.NDArray[np.bool_]:
        picks = np.argmax(np.stack([last_50(one) for one in times]), axis=0)
        return picks != (-1 if best is None else best)

    return errs


def sweep_cells() -> Iterator[Cell]:
    truths = {
        "all equal": (1.0, 1.0, 1.0),
        "two equal, one 5 % worse": (1.0, 1.0, 0.95),
        "one 2 % better": (1.0, 1.02, 1.0),
        "one 5 % better": (1.0, 1.05, 1.0),
    }
    blocks = (CALM, NOISY, EDGE, V4_LIKE, *NEIGHBORS)
    for protocol, noises, plan in (
        ("blocks", blocks, BUCKET_PLAN),
        ("launches", NOISES, BUCKET_LAUNCHES_PLAN),
    ):

        def decide(values: FloatArray, steps: Any, plan: Any = plan) -> Decision:
            return best_arm_sequential(ARMS, values, plan=plan, steps=steps)

        for noise in noises:
            for truth, speeds in truths.items():
                claims: tuple[Claim, ...] = (Claim("wrong", 0.01),)
                if max(speeds) == 1.05:
                    power = Claim("right", 0.99, at_most=False, when=_precise)
                    claims = (*claims, power)
                top = speeds.index(max(speeds)) if speeds.count(max(speeds)) == 1 else None
                run = _arms(
                    noise, speeds, decide, plan.max_rounds, launch=protocol == "launches",
                    best=None if top is None else ARMS[top], documented=_picks_wrongly(top),
                )  # fmt: skip
                error = "wrong arm" if max(speeds) > 1 else "some winner"
                yield Cell(f"best arm, {protocol}", noise, truth, run, claims, error, plan)


def _precise(result: Result) -> bool:
    """Power is promised only where 600 steps allow a standard error of at most 1.1 %."""
    return result.standard_error <= 0.011


def _keeps(plan: InterimPlan) -> Decide:
    return lambda values, steps: non_inferiority(values[:, 0], values[:, 1], plan=plan, steps=steps)


def _fused(noise: Noise, speed: float, *, launch: bool = False) -> Run:
    plan = FUSED_LAUNCHES_PLAN if launch else FUSED_PLAN

    def errs(times: list[FloatArray]) -> npt.NDArray[np.bool_]:
        return keep_fused(*times) == (speed < 1)

    return _arms(noise, (1.0, speed), _keeps(plan), plan.max_rounds, launch=launch, documented=errs)


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
            run = _fused(noise, speed, launch=True)
            asked = f"{question}, launches"
            yield Cell(asked, noise, truth, run, claims, error, FUSED_LAUNCHES_PLAN)


def stalling_cells() -> Iterator[Cell]:
    """The variant loses so many step times at once in a tenth of its rounds, else it is equal."""
    question, plan = "fused AdamW that stalls in a tenth of its rounds", FUSED_PLAN
    for noise in (CALM, NOISY):
        for steps in (6.0, 10.0, 40.0):
            truth = f"for {steps:.0f} steps, {steps / 2:.0f} % of its time"
            run = _arms(
                noise, (1.0, 1.0), _keeps(plan), plan.max_rounds, stall_share=0.1, stall_steps=steps
            )
            yield Cell(question, noise, truth, run, (Claim("KEEP", 0.08),), plan=plan)


def equal_arms_cells() -> Iterator[Cell]:
    """`alarm` is a difference found between equal arms, whichever looks better."""

    def decide(values: FloatArray, steps: Any) -> Decision:
        return best_arm_sequential(ARMS[:2], values, plan=AA_PLAN, final=True, steps=steps)

    # The CPU profile cuts the plan off.
    cut = [load_profile("cpu").phases[name] for name in ("fused_adamw", "bucket_sweep")]
    sizes = {
        f"A/A, up to {AA_PLAN.max_rounds} rounds": (AA_PLAN.max_rounds, BLOCK_STEPS, BLOCK_WARMUP),
        **{
            f"A/A of {what} on the CPU profile": (one.rounds, one.steps, one.warmup)
            for what, one in zip(("fused AdamW", "the sweep"), cut, strict=True)
        },
    }
    for question, (rounds, steps, warmup) in sizes.items():
        for noise in (*NOISES, *NEIGHBORS):
            run = _arms(
                noise, (1.0, 1.0), decide, rounds, steps=steps, warmup=warmup, wrong="alarm"
            )
            yield Cell(question, noise, "equal", run, (Claim("alarm", 0.01),), plan=AA_PLAN)


def faster_cells() -> Iterator[Cell]:
    plan = FASTER_PLAN

    def decide(values: FloatArray, _steps: Any) -> Decision:
        ratios = values[:, 1] / values[:, 0]
        won, lost = (lower_bound(list(one)) > 1.0 for one in (ratios, 1 / ratios))
        said = Decided.PASS if won else Decided.FAIL if lost else Decided.INCONCLUSIVE
        return Decision(outcome=said, n=plan.units, reason="")

    for noise in NOISES:
        no = (Claim("PASS", plan.error, at_limit=True),)
        yes = () if noise is V4_LIKE else (Claim("PASS", 0.99, at_most=False),)
        for truth, speed, claims in (("equal", 1.0, no), ("10 % faster", 1.10, yes)):
            run = _arms(noise, (1.0, speed), decide, plan.units)
            yield Cell(f"v2 faster, {plan.units} rounds", noise, truth, run, claims, plan=plan)
