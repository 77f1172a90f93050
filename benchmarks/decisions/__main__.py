"""False-decision rates of our rules and of the hand-written runbook's, side by side.

    python -m benchmarks.decisions --runs 4000 --write benchmarks/results/decisions.md

Exit status 1 if a published figure is missed. One core, a few minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from pathlib import Path

import numpy as np

from benchmarks.decisions.catalog import Cell, Result, all_cells
from benchmarks.program import put_between
from runbook.stats.plans import PLANS, InterimPlan, Plan, TwoStagePlan

CHUNK = 500
SHOWN = ("right", "wrong", "TIE", "KEEP", "DROP", "PASS", "FAIL", "INVALID", "INCONCLUSIVE")


def simulate(cell: Cell, runs: int, seed: int = 0) -> Result:
    """All runs of one cell, in chunks that keep memory small; the same numbers every time."""
    name = zlib.crc32(cell.name.encode())
    total: Result | None = None
    streams = np.random.SeedSequence([seed, name]).spawn(-(-runs // CHUNK))
    for index, stream in enumerate(streams):
        size = min(CHUNK, runs - index * CHUNK)
        part = cell.run(np.random.default_rng(stream), size)
        total = part if total is None else merge(total, part)
    if total is None:
        raise ValueError(f"runs is {runs}; allowed: 1 or more")
    return total


def merge(a: Result, b: Result) -> Result:
    """Two results of one cell together."""
    runs = a.runs + b.runs

    def mean(first: float | None, second: float | None) -> float | None:
        if first is None or second is None:
            return None
        return (first * a.runs + second * b.runs) / runs

    # A spread is averaged as a variance.
    extra = {
        key: ((a.extra[key] ** 2 * a.runs + b.extra[key] ** 2 * b.runs) / runs) ** 0.5
        if key.startswith("standard_error")
        else (a.extra[key] * a.runs + b.extra[key] * b.runs) / runs
        for key in a.extra
    }
    return Result(
        answers=a.answers + b.answers,
        runs=runs,
        documented_rule=mean(a.documented_rule, b.documented_rule),
        steps=mean(a.steps, b.steps),
        extra=extra,
    )


def percent(rate: float, runs: int) -> str:
    """A rate with its Monte Carlo standard error; none seen or all seen: the 95 % bound."""
    if rate in (0.0, 1.0):
        return f"{rate:.0%} ({'<' if rate == 0.0 else '>'}{abs(rate - 3 / runs):.2%})"
    return f"{rate:.2%} ± {(rate * (1 - rate) / runs) ** 0.5:.2%}"


def row_of(cell: Cell, result: Result) -> dict[str, object]:
    """One JSON row."""
    return {
        "question": cell.question,
        "noise": cell.noise.name,
        "truth": cell.truth,
        "runs": result.runs,
        "rates": {name: count / result.runs for name, count in result.answers.items()},
        "documented_rule_error": result.documented_rule,
        "documented_rule_error_means": cell.documented_error,
        "mean_steps": result.steps,
        **result.extra,
        "claims": [
            {
                "answer": claim.answer,
                "limit": claim.limit,
                "at_most": claim.at_most,
                "holds": claim.holds(result),
            }
            for claim in cell.claims
        ],
        "parameters": cell.noise.to_dict(),
    }


def line_of(cell: Cell, result: Result) -> str:
    """One row of the Markdown table."""
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
    error = "" if result.documented_rule is None else percent(result.documented_rule, result.runs)
    note = f"{cell.documented_error}: {error}" if error else "no such rule"
    steps = "" if result.steps is None else f"{result.steps:.0f}"
    spread = result.extra.get("standard_error_600_steps")
    extra = "" if spread is None else f"{spread:.2%}"
    cells = (cell.noise.name, cell.truth, answers, figures, note, steps, extra)
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| noise | truth | our answers | figure | documented rule errs "
    "| mean steps | SE of 600 steps |\n"
    "|---|---|---|---|---|---|---|"
)
BEGIN, END = "<!-- begin: benchmarks/decisions.py -->", "<!-- end: benchmarks/decisions.py -->"


def noise_table(cells: list[Cell]) -> str:
    """Parameters of every noise that the cells use, one column each."""
    noises = {cell.noise.name: cell.noise.to_dict() for cell in cells}
    names = [name for name in next(iter(noises.values())) if name != "name"]
    lines = [
        "| parameter | " + " | ".join(noises) + " |",
        "|---" * (len(noises) + 1) + "|",
    ]
    for name in names:
        values = (f"{float(noise[name]):.4g}" for noise in noises.values())
        lines.append(f"| `{name}` | " + " | ".join(values) + " |")
    return "\n".join(lines)


def plan_table() -> str:
    """Every plan that a phase or a command follows, from the objects themselves."""
    lines = ["| question | plan | error |", "|---|---|---|"]
    lines += [f"| {name} | {_in_words(plan)} | {plan.error:.2%} |" for name, plan in PLANS.items()]
    return "\n".join(lines)


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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cells whose name contains this text")
    parser.add_argument("--json", type=Path, help="write all rates and parameters here")
    parser.add_argument("--write", type=Path, help="put the tables into this Markdown document")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs is {options.runs}; allowed: 1 or more")
    cells = [cell for cell in all_cells() if options.only in cell.name]
    rows, lines, missed, question = [], [], 0, ""
    for cell in cells:
        begun = time.process_time()
        result = simulate(cell, options.runs, options.seed)
        rows.append(row_of(cell, result))
        missed += sum(claim.holds(result) is False for claim in cell.claims)
        if cell.question != question:
            question = cell.question
            lines += ["", f"### {question[0].upper()}{question[1:]}", "", HEADER]
        lines.append(line_of(cell, result))
        print(f"{time.process_time() - begun:5.1f} s CPU  {cell.name}", file=sys.stderr)
    head = f"{options.runs} simulated runs per cell, seed {options.seed}.\n\n{noise_table(cells)}"
    tables = "\n".join([head, "", plan_table(), *lines])
    print(tables)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.write:
        put_between(options.write, BEGIN, END, tables)
    print(f"{missed} figure(s) missed" if missed else "all figures met", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
