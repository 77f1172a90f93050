"""The simulated situations: what is true, what our rule says, what the documented rule says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from documented_rules import halves_differ, keep_fused, last_50, level_memory, single_above_ddp
from noise_model import CALM, NOISES, NOISY, V4_LIKE, FloatArray, Noise, blocks, launch_effects
from noise_model import launches as simulate

from runbook.stats import (
    BUCKET_PLAN,
    FUSED_PLAN,
    SCALING_PLAN,
    Decision,
    LookPlan,
    faster,
    meets_target,
    memory_plateau,
    non_inferiority,
    regression,
    scaling,
    steady,
)
from runbook.stats.arms import judge_rounds_so_far

__all__ = ["Cell", "Claim", "Result", "all_cells"]

ARMS = ("25", "50", "100")
BLOCK_STEPS, BLOCK_WARMUP = 20, 3
LAUNCH_STEPS, LAUNCH_WARMUP = 50, 3
LAUNCH_PLAN = LookPlan(looks=(3, 4, 5, 6), error=0.01)
# The noisy machine with steps so erratic that 600 steps allow a standard error of 1.1 %.
EDGE = replace(NOISY, name="edge", step_sd=0.0425)


@dataclass
class Result:
    """Answers counted over the runs of a cell."""

    answers: Counter[str]
    runs: int
    documented_rule: float | None = None  # share of runs in which the documented rule errs
    steps: float | None = None  # mean steps that the decision took
    extra: dict[str, float] = field(default_factory=dict)

    def rate(self, answer: str) -> float:
        """Share of runs with this answer."""
        return self.answers[answer] / self.runs


@dataclass(frozen=True)
class Claim:
    """A published figure: the share of runs with this answer is at most (or at least) `limit`.

    `at_limit`: the truth lies exactly where the error rate is declared, so the simulated rate
    scatters around the limit and two Monte Carlo standard errors are allowed for.
    `when`: the claim is made only for results of which this is true.
    """

    answer: str
    limit: float
    at_most: bool = True
    at_limit: bool = False
    when: Callable[[Result], bool] = lambda _: True

    def holds(self, result: Result) -> bool | None:
        """True or False; None where the claim is not made."""
        if not self.when(result):
            return None
        rate = result.rate(self.answer)
        slack = 2 * (self.limit * (1 - self.limit) / result.runs) ** 0.5 if self.at_limit else 0.0
        return rate <= self.limit + slack if self.at_most else rate >= self.limit


@dataclass(frozen=True)
class Cell:
    """One situation. `run(rng, runs)` simulates it."""

    question: str
    noise: Noise
    truth: str
    run: Callable[[np.random.Generator, int], Result]
    claims: tuple[Claim, ...] = ()
    documented_error: str = ""

    @property
    def name(self) -> str:
        """Stable name; also seeds the random numbers."""
        return f"{self.question} | {self.noise.name} | {self.truth}"


def _count(decisions: list[Decision], best: str | None = None) -> Counter[str]:
    """Answers; a WINNER counts as `right` or `wrong`."""
    names = []
    for decision in decisions:
        said = decision.outcome.value
        if said == "WINNER":
            said = "right" if best is not None and decision.winner == best else "wrong"
        names.append(said)
    return Counter(names)


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


def _sweep(
    noise: Noise, speeds: tuple[float, ...], protocol: str
) -> Callable[[np.random.Generator, int], Result]:
    plan = BUCKET_PLAN if protocol == "blocks" else LAUNCH_PLAN
    steps = len(speeds) * (BLOCK_STEPS + BLOCK_WARMUP)
    if protocol != "blocks":
        steps = len(speeds) * (LAUNCH_STEPS + LAUNCH_WARMUP)
    top = max(speeds)
    best = ARMS[speeds.index(top)] if speeds.count(top) == 1 else None

    def run(rng: np.random.Generator, runs: int) -> Result:
        values = _values(rng, noise, runs, speeds, plan.max_rounds, protocol)
        decisions = [judge_rounds_so_far(ARMS, one, plan=plan) for one in values]
        budget = 600 // steps
        gaps = np.log(values[:, :budget, 0] / values[:, :budget, 2]).mean(axis=1)
        picks = _documented_winner(rng, noise, runs, speeds)
        right = best is not None and picks == ARMS.index(best)
        return Result(
            answers=_count(decisions, best),
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
) -> FloatArray:
    """Throughput [runs, rounds, arms]."""
    if protocol == "blocks":
        return blocks(
            rng, noise, runs, speeds, rounds, steps=BLOCK_STEPS, warmup_steps=BLOCK_WARMUP
        )
    effects = launch_effects(rng, noise, (runs, rounds), len(speeds))
    length = LAUNCH_STEPS + LAUNCH_WARMUP
    times = simulate(rng, noise, effects.size, length, launch_effect=effects.ravel())
    rate = LAUNCH_STEPS / times[:, LAUNCH_WARMUP:].sum(axis=1)
    return rate.reshape(effects.shape) * np.asarray(speeds)


def _sweep_cells() -> Iterator[Cell]:
    truths = {
        "all equal": (1.0, 1.0, 1.0),
        "two equal, one 5 % worse": (1.0, 1.0, 0.95),
        "one 2 % better": (1.0, 1.02, 1.0),
        "one 5 % better": (1.0, 1.05, 1.0),
    }
    for protocol, noises in (("blocks", (CALM, NOISY, EDGE, V4_LIKE)), ("launches", NOISES)):
        for noise in noises:
            for truth, speeds in truths.items():
                claims: tuple[Claim, ...] = (Claim("wrong", 0.01),)
                if max(speeds) == 1.05:
                    power = Claim("right", 0.99, at_most=False, when=_precise)
                    claims = (*claims, power)
                question = f"best arm, {protocol}"
                run = _sweep(noise, speeds, protocol)
                error = "some winner" if speeds.count(1.0) > 1 and max(speeds) == 1 else "wrong arm"
                yield Cell(question, noise, truth, run, claims, error)


def _precise(result: Result) -> bool:
    """Power is promised only where 600 steps allow a standard error of at most 1.1 %."""
    return result.extra["standard_error_600_steps"] <= 0.011


def _fused(noise: Noise, speed: float) -> Callable[[np.random.Generator, int], Result]:
    def run(rng: np.random.Generator, runs: int) -> Result:
        plan = FUSED_PLAN
        values = _values(rng, noise, runs, (1.0, speed), plan.max_rounds, "blocks")
        decisions = [non_inferiority(v[:, 0], v[:, 1], plan=plan) for v in values]
        effects = launch_effects(rng, noise, (runs,), 2)
        plain, fused = (
            simulate(rng, noise, runs, 200, launch_effect=effects[:, arm]) for arm in (0, 1)
        )
        kept = float(np.mean(keep_fused(plain, fused / speed)))
        mean_rounds = float(np.mean([decision.n for decision in decisions]))
        return Result(
            answers=_count(decisions),
            runs=runs,
            documented_rule=kept if speed < 1 else 1 - kept,
            steps=2 * (BLOCK_STEPS + BLOCK_WARMUP) * mean_rounds,
        )

    return run


def _fused_cells() -> Iterator[Cell]:
    question = "fused AdamW (margin 2 %)"
    for noise in NOISES:
        slow = (Claim("KEEP", 0.001),)
        yield Cell(question, noise, "5 % slower", _fused(noise, 0.95), slow, "kept")
        edge = (Claim("KEEP", 0.05, at_limit=True),)
        yield Cell(question, noise, "2 % slower: at the margin", _fused(noise, 0.98), edge, "kept")
        same = () if noise is V4_LIKE else (Claim("KEEP", 0.90, at_most=False),)
        yield Cell(question, noise, "equal", _fused(noise, 1.0), same, "dropped")


def _target(noise: Noise, level: float) -> Callable[[np.random.Generator, int], Result]:
    def run(rng: np.random.Generator, runs: int) -> Result:
        effects = launch_effects(rng, replace(noise, shared=0.0), (runs,), 3).ravel()
        times = simulate(rng, noise, 3 * runs, 100, launch_effect=effects)[:, LAUNCH_WARMUP:]
        rates = level * times.shape[1] / times.sum(axis=1).reshape(runs, 3)
        # The truth is the long-run throughput of this machine, pauses included.
        rates *= 1 + noise.pause_rate * (1 + noise.pause_mean)
        once = simulate(rng, noise, runs, 300)
        passed = float(np.mean(level * last_50(once) >= 1.0))
        return Result(
            answers=_count([meets_target(row, 1.0) for row in rates]),
            runs=runs,
            documented_rule=passed if level < 1 else 1 - passed,
            steps=300.0,
        )

    return run


def _target_cells() -> Iterator[Cell]:
    question = "throughput target, 3 launches"
    for noise in NOISES:
        under = (Claim("PASS", 0.05),)
        yield Cell(question, noise, "2 % under", _target(noise, 0.98), under, "passed")
        yield Cell(question, noise, "5 % under", _target(noise, 0.95), under, "passed")
        yield Cell(question, noise, "10 % above", _target(noise, 1.10), (), "failed")


def _steady(noise: Noise, trend: float) -> Callable[[np.random.Generator, int], Result]:
    def run(rng: np.random.Generator, runs: int) -> Result:
        times = simulate(rng, noise, runs, 1200, drift=False, trend=trend)
        flagged = float(np.mean(halves_differ(times[:, 20:])))
        return Result(
            answers=_count([steady(row) for row in times]),
            runs=runs,
            documented_rule=1 - flagged if trend else flagged,
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
        level: tuple[Claim, ...] = (Claim("FAIL", 0.05),)
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
        return Result(answers=_count(decisions), runs=runs, documented_rule=wrong, steps=1200.0)

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
    def run(rng: np.random.Generator, runs: int) -> Result:
        most = SCALING_PLAN.max_rounds
        effects = launch_effects(rng, noise, (runs, most), 2)
        times = simulate(rng, noise, effects.size, 100, launch_effect=effects.ravel())
        rate = (97 / times[:, LAUNCH_WARMUP:].sum(axis=1)).reshape(effects.shape)
        one, many = rate[:, :, 0], 2 * efficiency * rate[:, :, 1]
        decisions = [scaling(a, b, 2, plan=SCALING_PLAN) for a, b in zip(one, many, strict=True)]
        above = float(np.mean(single_above_ddp(one[:, 0], many[:, 0], 2)))
        pairs = float(np.mean([decision.n for decision in decisions]))
        wrong = above if efficiency <= 0.9 else 1 - above
        return Result(
            answers=_count(decisions), runs=runs, documented_rule=wrong, steps=200 * pairs
        )

    return run


def _scaling_cells() -> Iterator[Cell]:
    question = "scaling (limit 0.90), up to 5 pairs"
    own = replace(CALM, name="calm, pairs independent", shared=0.0)
    for noise in (*NOISES, own):
        for truth in (0.5, 0.88, 0.90):
            claims = (Claim("PASS", 0.01, at_limit=truth == 0.90),)
            yield Cell(question, noise, f"E = {truth}", _scaling(noise, truth), claims, "passed")
        good = (Claim("PASS", 0.90, at_most=False),) if noise is CALM else ()
        yield Cell(question, noise, "E = 0.95", _scaling(noise, 0.95), good, "failed")


def _nightly(noise: Noise, speed: float) -> Callable[[np.random.Generator, int], Result]:
    """`FAIL` counts nights with an alarm, `caught in 3` runs of three nights with at least one."""

    def run(rng: np.random.Generator, runs: int) -> Result:
        nights = 3
        effects = launch_effects(rng, noise, (runs * nights, 12), 2)
        times = simulate(rng, noise, effects.size, 53, launch_effect=effects.ravel())
        rate = (50 / times[:, LAUNCH_WARMUP:].sum(axis=1)).reshape(effects.shape)
        rate[:, :, 1] *= speed
        decisions = [regression(night[:, 0], night[:, 1]) for night in rate]
        alarm = np.array([decision.outcome.value == "FAIL" for decision in decisions])
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
            steps=2 * 53 * rounds,
            extra={"alarms_in_30_nights": 30 * float(alarm.mean())},
        )

    return run


def _nightly_cells() -> Iterator[Cell]:
    question = "nightly regression against a pinned reference"
    for noise in NOISES:
        same = (Claim("FAIL", 0.01),)
        yield Cell(question, noise, "no change", _nightly(noise, 1.0), same, "false alarm, -5 %")
        caught = (Claim("caught in 3", 0.98, at_most=False),) if noise is CALM else ()
        yield Cell(
            question, noise, "5 % slower", _nightly(noise, 0.95), caught, "missed that night"
        )


def _faster(noise: Noise, speed: float) -> Callable[[np.random.Generator, int], Result]:
    def run(rng: np.random.Generator, runs: int) -> Result:
        values = _values(rng, noise, runs, (1.0, speed), 10, "blocks")
        return Result(
            answers=_count([faster(v[:, 1], v[:, 0]) for v in values]),
            runs=runs,
            steps=10.0 * 2 * (BLOCK_STEPS + BLOCK_WARMUP),
        )

    return run


def _faster_cells() -> Iterator[Cell]:
    for noise in NOISES:
        no = (Claim("PASS", 0.05, at_limit=True),)
        yield Cell("v2 faster, 10 rounds", noise, "equal", _faster(noise, 1.0), no)
        yes = () if noise is V4_LIKE else (Claim("PASS", 0.99, at_most=False),)
        yield Cell("v2 faster, 10 rounds", noise, "10 % faster", _faster(noise, 1.10), yes)


def all_cells() -> list[Cell]:
    """Every situation, in the order of the published table."""
    groups = (
        _sweep_cells,
        _fused_cells,
        _target_cells,
        _steady_cells,
        _memory_cells,
        _scaling_cells,
        _nightly_cells,
        _faster_cells,
    )
    return [cell for group in groups for cell in group()]
