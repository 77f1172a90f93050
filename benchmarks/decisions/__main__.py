"""False-decision rates of our rules and of the hand-written runbook's, side by side.

    python -m benchmarks.decisions --runs 4000 --write benchmarks/results/decisions.md

Exit status 1 if a published figure is missed. One core, a few minutes.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import numpy as np

from benchmarks.decisions.catalog import Cell, Result, all_cells
from benchmarks.decisions.cells import PLANS, Plan
from benchmarks.program import markdown_table, put_between
from runbook.stats import InterimPlan, TwoStagePlan

CHUNK = 500
SHOWN = ("right", "wrong", "TIE", "KEEP", "DROP", "PASS", "FAIL", "INVALID", "INCONCLUSIVE")


def simulate(cell: Cell, runs: int) -> Result:
    """All runs of one cell, in chunks that keep memory small; the same numbers every time.

    Raises ValueError for no run.
    """
    if runs < 1:
        raise ValueError(f"runs is {runs}; allowed: 1 or more")
    streams = np.random.SeedSequence([0, zlib.crc32(cell.name.encode())]).spawn(-(-runs // CHUNK))
    parts = [
        cell.run(np.random.default_rng(stream), min(CHUNK, runs - index * CHUNK))
        for index, stream in enumerate(streams)
    ]
    return sum(parts[1:], parts[0])


def percent(rate: float, runs: int) -> str:
    """A rate with its Monte Carlo standard error; none seen or all seen: the 95 % bound."""
    if rate in (0.0, 1.0):
        return f"{rate:.0%} ({'<' if rate == 0.0 else '>'}{abs(rate - 3 / runs):.2%})"
    return f"{rate:.2%} ± {(rate * (1 - rate) / runs) ** 0.5:.2%}"


def row_of(cell: Cell, result: Result) -> tuple[str, ...]:
    """One row of the table."""
    order = (*SHOWN, *sorted(set(result.answers) - set(SHOWN)))
    answers = ", ".join(
        f"{name} {percent(result.rate(name), result.runs)}"
        for name in order
        if result.answers[name]
    )
    figures = "; ".join(
        f"{claim.answer} {'≤' if claim.at_most else '≥'} {claim.limit:.1%}:"
        f" {percent(result.rate(claim.answer), result.runs)}"
        f" {'met' if holds else 'MISSED'}"
        for claim in cell.claims
        if (holds := claim.holds(result)) is not None
    )
    note = "no such rule"
    if cell.documented_error:
        note = f"{cell.documented_error}: {percent(result.documented_rule, result.runs)}"
    spread = f"{result.standard_error:.2%}" if cell.question.startswith("best arm") else ""
    steps = f"{result.steps / result.runs:.0f}"
    return cell.noise.name, cell.truth, answers, figures, note, steps, spread


HEADER = ("noise", "truth", "our answers", "figure", "documented rule errs", "mean steps",
          "SE of 600 steps")  # fmt: skip
BEGIN, END = "<!-- begin: benchmarks/decisions.py -->", "<!-- end: benchmarks/decisions.py -->"


def noise_table(cells: list[Cell]) -> str:
    """Parameters of every noise that the cells use, one column each."""
    noises = {cell.noise.name: asdict(cell.noise) for cell in cells}
    names = [name for name in next(iter(noises.values())) if name != "name"]
    rows = [
        (f"`{name}`", *(f"{float(noise[name]):.4g}" for noise in noises.values())) for name in names
    ]
    return markdown_table(("parameter", *noises), rows)


def plan_table() -> str:
    """Every plan that a phase or a command follows, from the objects themselves."""
    rows = [(name, _in_words(plan), f"{plan.error:.2%}") for name, plan in PLANS.items()]
    return markdown_table(("question", "plan", "error"), rows)


def _in_words(plan: Plan) -> str:
    if isinstance(plan, InterimPlan):
        rounds = ", ".join(str(count) for count in plan.analyses)
        keep = "; KEEP after the last only" if plan.keep_at_end else ""
        return f"after {rounds} rounds, share of the error as rounds^{plan.power:g}{keep}"
    if isinstance(plan, TwoStagePlan):
        return f"{plan.first} rounds; {plan.more} more if p < {plan.suspicion:g}"
    return f"once, {plan.units} of them"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=4000, help="simulated runs per cell")
    parser.add_argument("--write", type=Path, help="put the tables into this Markdown document")
    options = parser.parse_args()
    cells = all_cells()
    tables = (
        f"{options.runs} simulated runs per cell, seed 0.\n\n{noise_table(cells)}\n{plan_table()}"
    )
    missed = 0
    for question, those in groupby(cells, key=lambda cell: cell.question):
        rows = []
        for cell in those:
            result = simulate(cell, options.runs)
            missed += sum(claim.holds(result) is False for claim in cell.claims)
            rows.append(row_of(cell, result))
            print(cell.name, file=sys.stderr)
        tables += f"\n### {question[0].upper()}{question[1:]}\n\n{markdown_table(HEADER, rows)}"
    print(tables)
    if options.write:
        put_between(options.write, BEGIN, END, tables.rstrip("\n"))
    print(f"{missed} figure(s) missed" if missed else "all figures met", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
