"""Error rates of the comparisons with earlier runs, in results/accepted_runs.md.

`python -m benchmarks.accepted_runs` prints the tables; half a minute on one core. Half of the
variance of a launch is that of its night, as on the simulated machines of that page.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from itertools import product
from statistics import geometric_mean

import numpy as np

from benchmarks.program import markdown_table
from runbook.stats.decision import Decided
from runbook.stats.levels import LEVEL_RUNS, LEVEL_WINDOW, below_level, loss_shown

MACHINES = {"calm": 0.02, "noisy": 0.035, "v4-like": 0.05}
LOSSES = (0.0, 0.05, 0.10, 0.15, 0.30, 2 / 3)
ALLOWED = 0.05
LAUNCHES = 3


def nights(spread: float, random: np.random.Generator, loss: float = 0.0) -> Iterator[list[float]]:
    """The launches of one night after the other."""
    part = spread * math.sqrt(0.5)
    while True:
        middle = math.log(1e5 * (1 - loss)) + random.normal(0, part)
        yield [math.exp(middle + random.normal(0, part)) for _ in range(LAUNCHES)]


def against_last(spread: float, loss: float, random: np.random.Generator) -> bool:
    """Is a loss shown against one earlier run?"""
    before, now = next(nights(spread, random)), next(nights(spread, random, loss))
    return loss_shown(before, now, allowance=ALLOWED).outcome is Decided.FAIL


def against_level(runs: int) -> Callable[[float, float, np.random.Generator], bool]:
    """Is a loss shown against the best level of so many runs?"""

    def decide(spread: float, loss: float, random: np.random.Generator) -> bool:
        source = nights(spread, random)
        history = [geometric_mean(next(source)) for _ in range(runs)]
        now = geometric_mean(next(nights(spread, random, loss)))
        return below_level(history, now, allowance=ALLOWED).outcome is Decided.FAIL

    return decide


def stopped_at(
    spread: float, by: float, random: np.random.Generator, *, level: bool = True
) -> float:
    """The loss at which a machine that loses `by` a night is no longer accepted.

    level: it is held against the best level, too, and not against the last run alone.
    """
    source = nights(spread, random)
    accepted = [next(source) for _ in range(10)]
    for night in range(1, 200):
        left = (1 - by) ** night
        now = [rate * left for rate in next(source)]
        history = [geometric_mean(one) for one in accepted]
        decisions = [loss_shown(accepted[-1], now, allowance=ALLOWED)]
        if level:
            decisions.append(below_level(history, geometric_mean(now), allowance=ALLOWED))
        if any(one.outcome is Decided.FAIL for one in decisions):
            return 1 - left
        accepted.append(now)
    return 1.0


def main() -> None:
    """Print both tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000, help="simulated runs of each cell")
    runs = parser.parse_args().runs
    random = np.random.default_rng(0)
    rules = {
        "last accepted run": against_last,
        f"best level of {LEVEL_RUNS} runs": against_level(LEVEL_RUNS),
        f"best level of {LEVEL_WINDOW} runs": against_level(LEVEL_WINDOW),
    }
    shown = []
    for (name, rule), (machine, spread) in product(rules.items(), MACHINES.items()):
        rates = [sum(rule(spread, loss, random) for _ in range(runs)) / runs for loss in LOSSES]
        shown.append((name, machine, *(f"{rate:.1%}" for rate in rates)))
    print(markdown_table(("rule", "machine", *(f"{loss:.0%} lost" for loss in LOSSES)), shown))
    stopped = []
    for (machine, spread), by in product(MACHINES.items(), (0.005, 0.01)):
        found = [stopped_at(spread, by, random) for _ in range(runs // 10)]
        bounds = (np.median(found), np.quantile(found, 0.95))
        stopped.append((machine, f"{by:.1%}", *(f"{bound:.1%}" for bound in bounds)))
    header = ("machine", "a night", "stopped at a loss of (median)", "in 95 % of cases at most")
    print(markdown_table(header, stopped))


if __name__ == "__main__":
    main()
