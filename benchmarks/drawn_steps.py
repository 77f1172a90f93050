"""How often is a defect of few steps met by the steps that are looked at?

    python -m benchmarks.drawn_steps [--profile cpu] [--tokens 4000] [--legs 10]

The launches are those of `runbook run` on a profile, at their longest; `--legs N` adds the legs of
a production run of 50,000 steps. The defect is in the last step but two of every 10, 100 or 1,000,
in all launches: short ones never come there, and the last two steps are always watched. For each
token the steps are drawn by `nsa.contract.digests`, as in any run. Printed are the chances that
such a step is computed a second time (a wrong gradient is met) and that it is watched (a wrong
update is met), and what share of the steps is computed twice.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from nsa.contract.digests import recomputed_steps, watched_steps
from runbook.records.launch import PROFILE_FLAG

_PRODUCTION = 50_000

Draws = Callable[["Span", str], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Span:
    """A launch of so many steps; `first` is 1 unless it goes on from another one."""

    name: str
    first: int
    last: int
    profiled: bool = False

    def recomputed(self, token: str) -> tuple[int, ...]:
        """The steps that are computed twice."""
        return recomputed_steps(token, self.first, self.last, profiled=self.profiled)

    def watched(self, token: str) -> tuple[int, ...]:
        """The steps in which the optimizer is watched."""
        return watched_steps(token, self.first, self.last)


def planned(profile: str) -> list[Span]:
    """The launches of the trainer that `runbook run --dry-run` lists, at their longest."""
    words = ["-m", "runbook", "run", "--dry-run", "--json", "--profile", profile]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    found = []
    for phase in json.loads(done.stdout)["phases"]:
        for launch in phase["launches"]:
            if "nsa.train" in launch["command"]:
                name = f"{phase['name']}/{launch['name']}"
                profiled = any(word.startswith(PROFILE_FLAG) for word in launch["argv"])
                found.append(Span(name=name, first=1, last=launch["steps"], profiled=profiled))
    return found


def legs(count: int) -> list[Span]:
    """A production run in so many legs; 0: none."""
    ends = [_PRODUCTION * number // count for number in range(count + 1)] if count else []
    return [
        Span(name=f"production/{end}", first=begin + 1, last=end) for begin, end in pairwise(ends)
    ]


def chance(spans: Sequence[Span], draws: Draws, *, period: int, tokens: int) -> float:
    """The share of runs in which a drawn step of any launch is the last but two of a period."""
    met = 0
    for number in range(tokens):
        met += any(
            step % period == period - 2
            for span in spans
            for step in draws(span, f"{number} {span.name}")
        )
    return met / tokens


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drawn_steps")
    parser.add_argument("--profile", default="cpu")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--legs", type=int, default=0)
    asked = parser.parse_args(words)
    spans = [*planned(asked.profile), *legs(asked.legs)]
    draws = {"computed twice": Span.recomputed, "watched": Span.watched}
    for period, (what, draw) in product((10, 100, 1000), draws.items()):
        met = chance(spans, draw, period=period, tokens=asked.tokens)
        print(f"one step in {period} is {what} in {met:.1%} of runs")
    steps = sum(span.last - span.first + 1 for span in spans)
    twice = sum(len(span.recomputed("0")) for span in spans)
    print(f"{twice} of {steps} steps are computed twice ({twice / steps:.2%})")


if __name__ == "__main__":
    main()
