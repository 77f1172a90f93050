"""`runbook decide`: one question to anybody's CSV, answered at a declared error rate."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from runbook.cli._parser import add_output_flags
from runbook.console import Console, console_for, printable

# Each question with the options it takes; the first group is required.
QUESTION_NAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "best-arm": ((), ("error",)),
    "non-inferiority": ((), ("margin", "error", "baseline")),
    "target": (("target",), ("error",)),
    "steady": ((), ("tolerance", "error")),
    "memory": (("limit", "project_to_step"), ()),
    "scaling": (("devices",), ("limit", "error")),
    "faster": ((), ("error", "baseline")),
}
_EXIT = {"PASS": 0, "WINNER": 0, "TIE": 0, "KEEP": 0, "INCONCLUSIVE": 3}
_DESCRIPTION = """\
Answer one question about the numbers in a CSV file (with a header), at a declared error rate.

question         columns                                 asks
best-arm         arm,block,value                         which arm beats all others?
non-inferiority  baseline,variant (a row per round)      is the variant at most 2 % slower?
faster           a,b (a row per round)                   is a faster than b?
target           value (a row per LAUNCH)                is --target reached?
steady           dt_s (a row per step)                   does the step time stay level?
memory           step,mem_mib                            has memory stopped growing?
scaling          t1,tN (a row per pair of launches)      is T_N / (N T_1) at least 0.90?

A value is tokens / time of a whole block or launch, never a mean of rates. best-arm,
non-inferiority and faster also take arm,block,value of two arms (--baseline names the first), or
this program's training.csv with its columns arm, block, tokens and dt_s."""
_EPILOG = """\
examples:
  runbook decide best-arm blocks.csv
  runbook decide target launches.csv --target 39
  runbook decide memory training.csv --limit 61440 --project-to-step 50000 --json
exit codes: 0 PASS, WINNER, TIE, KEEP; 1 FAIL, DROP, INVALID; 2 usage; 3 INCONCLUSIVE"""


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "decide",
        help="answer one question about anybody's CSV at a declared error rate",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("question", metavar="QUESTION", help=", ".join(QUESTION_NAMES))
    parser.add_argument("file", metavar="FILE.csv", type=Path, help="the numbers")
    parser.add_argument("--target", type=float, metavar="TOK_S", help="target: the floor")
    parser.add_argument("--error", type=float, help="declared error rate, such as 0.01")
    parser.add_argument("--margin", type=float, help="non-inferiority: accepted loss (0.02)")
    parser.add_argument(
        "--limit", type=float, help="memory: most MiB; scaling: least efficiency (0.90)"
    )
    parser.add_argument("--tolerance", type=float, help="steady: accepted change (0.03)")
    parser.add_argument("--devices", type=int, metavar="N", help="scaling: number of devices")
    parser.add_argument(
        "--project-to-step", type=float, metavar="STEP", help="memory: last production step"
    )
    parser.add_argument("--baseline", metavar="ARM", help="which of two arms is the baseline")
    add_output_flags(parser, json_help="one JSON document on stdout")
    parser.set_defaults(run=run)


def problems(args: argparse.Namespace) -> list[str]:
    """Everything wrong with the combination of question and options."""
    from runbook.errors import did_you_mean

    if args.question not in QUESTION_NAMES:
        near = did_you_mean(args.question, QUESTION_NAMES)
        return [f"unknown question {args.question!r}{near}; allowed: {', '.join(QUESTION_NAMES)}"]
    required, optional = QUESTION_NAMES[args.question]
    found = [f"{args.question} needs {_flag(name)}" for name in required if _of(args, name) is None]
    for name in _option_names():
        if _of(args, name) is not None and name not in (*required, *optional):
            takes = ", ".join(_flag(option) for option in (*required, *optional)) or "no option"
            found.append(f"{args.question} does not take {_flag(name)}; it takes {takes}")
    return found


def run(args: argparse.Namespace) -> int:
    """Print the decision; the exit code says how it went."""
    from runbook.errors import UsageError
    from runbook.tools.columns import read_table
    from runbook.tools.decide import Options, ask

    if wrong := problems(args):
        raise UsageError(wrong, hint="see runbook decide --help")
    table = read_table(args.file)
    decision = ask(
        args.question, table, Options(**{name: _of(args, name) for name in _option_names()})
    )
    console = console_for(args)
    if args.json:
        console.json_document(
            {
                "schema_version": 1,
                "question": args.question,
                "file": table.name,
                "sha256": table.sha256,
                "rows": len(table.rows),
                **decision.to_dict(),
            }
        )
    else:
        _print(console, args.question, table.name, decision.outcome.value, decision)
    return _EXIT.get(decision.outcome.value, 1)


def _print(console: Console, question: str, name: str, outcome: str, decision: Any) -> None:
    style = {0: "good", 1: "bad", 3: "unsure"}[_EXIT.get(outcome, 1)]
    head = console.paint(outcome, style)
    winner = f" {decision.winner}" if decision.winner else ""
    console.result(head + printable(winner))
    console.result(f"  {printable(decision.reason)}")
    if decision.interval is not None:
        low, high = decision.interval
        console.result(
            f"  estimate {decision.estimate:.5g} ({low:.5g} to {high:.5g}) {decision.unit},"
            f" n = {decision.n}"
        )
    console.result(f"  declared error {decision.error_rate:g}; {question}, {printable(name)}")


def _option_names() -> list[str]:
    named = {name for groups in QUESTION_NAMES.values() for group in groups for name in group}
    return sorted(named)


def _of(args: argparse.Namespace, name: str) -> Any:
    return getattr(args, name, None)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
