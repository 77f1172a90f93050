"""The decisions as questions to a CSV file: which columns each needs, and how it is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runbook.errors import UsageError, did_you_mean
from runbook.stats.arms import judge_rounds, rounds_of
from runbook.stats.decision import Decision, FloatArray
from runbook.stats.launches import meets_target, scaling
from runbook.stats.memory import memory_plateau
from runbook.stats.pairs import faster, non_inferiority
from runbook.stats.plans import BUCKET_PLAN, FUSED_PLAN, SCALING_PLAN
from runbook.stats.steady import steady
from runbook.tools.columns import Table

if TYPE_CHECKING:
    import pandas as pd


LONG = "needed: arm,block,value, or a training.csv with arm,block,tokens,dt_s"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Numbers that go with a question; None: the function's own default (or not needed)."""

    error: float | None = None
    target: float | None = None
    margin: float | None = None
    limit: float | None = None
    tolerance: float | None = None
    devices: int | None = None
    project_to_step: float | None = None
    baseline: str | None = None


def ask(question: str, table: Table, options: Options) -> Decision:
    """Put one of QUESTIONS to a table.

    Raises:
        UsageError: a column or an option is missing, a cell is not what it should be.
    """
    return QUESTIONS[question](table, options)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _needed(value: float | None, flag: str, question: str) -> float:
    if value is None:
        raise UsageError(f"{question} needs {flag}")
    return value


def _best_arm(table: Table, options: Options) -> Decision:
    arms, values = rounds_of(_arms(table))
    return judge_rounds(arms, values, error=_or(options.error, BUCKET_PLAN.error))


def _arms(table: Table) -> pd.DataFrame:
    """Columns arm, block, value; from a training.csv: tokens / time of each block."""
    import pandas as pd

    if table.has("arm", "block", "value"):
        return pd.DataFrame(
            {
                "arm": table.text("arm"),
                "block": _maybe_numbers(table.text("block")),
                "value": table.numbers("value"),
            }
        )
    if not table.has("tokens", "dt_s"):
        table.need("arm", "block", "value", hint=LONG)
    table.need("arm", "block", "tokens", "dt_s", hint=LONG)
    table.one_run()
    rows = pd.DataFrame(
        {
            "arm": table.text("arm"),
            "block": _maybe_numbers(table.text("block")),
            "tokens": table.numbers("tokens"),
            "dt_s": table.numbers("dt_s"),
        }
    )
    if table.has("warmup"):
        rows = rows[table.numbers("warmup", above=-1.0) == 0]
    sums = rows.groupby(["arm", "block"], sort=False)[["tokens", "dt_s"]].sum().reset_index()
    return sums.assign(value=sums["tokens"] / sums["dt_s"])[["arm", "block", "value"]]


def _maybe_numbers(cells: list[str]) -> list[float] | list[str]:
    try:
        return [float(cell) for cell in cells]
    except ValueError:
        return cells


def _two(table: Table, names: tuple[str, str], options: Options) -> tuple[FloatArray, FloatArray]:
    """Two paired columns, or the two arms of a long table (`--baseline` is the first)."""
    if table.has(*names):
        return table.numbers(names[0]), table.numbers(names[1])
    if not (table.has("arm", "block") and (table.has("value") or table.has("tokens", "dt_s"))):
        table.need(*names, hint=f"needed: {','.join(names)} (one row per round), or {LONG[8:]}")
    arms, values = rounds_of(_arms(table))
    if len(arms) != 2:
        raise UsageError(f"{table.name}: arms {', '.join(arms)}; exactly two can be compared")
    first = options.baseline or (names[0] if names[0] in arms else "")
    if first not in arms:
        raise UsageError(
            f"no arm {first!r}{did_you_mean(first, arms)}"
            if first
            else f"{table.name} does not say which arm is the baseline; give --baseline ARM",
            hint=f"arms: {', '.join(arms)}",
        )
    at = arms.index(first)
    return values[:, at], values[:, 1 - at]


def _non_inferiority(table: Table, options: Options) -> Decision:
    baseline, variant = _two(table, ("baseline", "variant"), options)
    margin, error = _or(options.margin, 0.02), _or(options.error, FUSED_PLAN.error)
    return non_inferiority(baseline, variant, margin, error)


def _faster(table: Table, options: Options) -> Decision:
    error = _or(options.error, 0.05)
    if table.has("a", "b"):
        return faster(table.numbers("a"), table.numbers("b"), error)
    base, other = _two(table, ("baseline", "variant"), options)
    return faster(other, base, error)


def _target(table: Table, options: Options) -> Decision:
    target = _needed(options.target, "--target TOK_S", "target")
    table.need("value", hint="needed: one row per launch, its throughput in column value")
    return meets_target(table.numbers("value"), target, _or(options.error, 0.05))


def _steady(table: Table, options: Options) -> Decision:
    table.need("dt_s", hint="needed: one row per step, its seconds in column dt_s")
    table.one_run()
    tolerance, error = _or(options.tolerance, 0.03), _or(options.error, 0.05)
    return steady(table.numbers("dt_s"), tolerance=tolerance, error=error)


def _memory(table: Table, options: Options) -> Decision:
    limit = _needed(options.limit, "--limit MIB", "memory")
    goal = _needed(options.project_to_step, "--project-to-step STEP", "memory")
    table.need("step", "mem_mib", hint="needed: one row per step, memory in column mem_mib")
    table.one_run()
    steps = table.numbers("step", above=-1.0)
    return memory_plateau(steps, table.numbers("mem_mib"), goal, limit)


def _scaling(table: Table, options: Options) -> Decision:
    devices = int(_needed(options.devices, "--devices N", "scaling"))
    table.need("t1", "tN", hint="needed: one row per pair of launches, throughputs t1 and tN")
    limit, error = _or(options.limit, 0.90), _or(options.error, SCALING_PLAN.error)
    return scaling(table.numbers("t1"), table.numbers("tN"), devices, limit=limit, error=error)


QUESTIONS: dict[str, Callable[[Table, Options], Decision]] = {
    "best-arm": _best_arm,
    "non-inferiority": _non_inferiority,
    "target": _target,
    "steady": _steady,
    "memory": _memory,
    "scaling": _scaling,
    "faster": _faster,
}
