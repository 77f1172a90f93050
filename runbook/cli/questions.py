"""Commands that judge what others measured: `inspect`, `decide` and `replay`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from runbook.cli._parser import command, number_type, option_table
from runbook.cli._runs import folder_of
from runbook.console import Console
from runbook.errors import ProgramExit, did_you_mean

if TYPE_CHECKING:
    from runbook.stats.decision import Decision
    from runbook.tools.replay.judge import ReplayRecord


def _floor(text: str) -> float:
    if text == "none":
        return float("-inf")
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of nats >= 0 nor `none`")
    return value


@command(
    "judge any run directory, read-only: what it holds and what is suspicious",
    arguments=option_table(
        """
        directory DIR      a run's directory or id, or one CSV file
        --loss-floor NATS  lowest loss that is possible, or `none` (default: from env.json, else
                           ln 256)
        """,
        loss_floor=_floor,
    ),
)
def inspect(args: argparse.Namespace, console: Console) -> int:
    """Judge a run directory without changing it: which runs its training.csv holds, which
    window its numbers come from, and everything suspicious. Reads this trainer's format
    and the older one: no header, step,loss,lr,toks_per_s, a row every k steps.

    examples:
      runbook inspect artifacts/m7c_125m_2xa100_prod
      runbook inspect old/training.csv --loss-floor 5.545
    exit codes: 0 nothing suspicious, 1 suspicious, 2 usage, 3 too little to say
    """
    from runbook.tools.inspect.folder import inspect_path
    from runbook.tools.inspect.types import inspection_text

    inspection = inspect_path(folder_of(args.directory), loss_floor=args.loss_floor)
    if args.json:
        console.json_document(inspection.document())
    else:
        console.page(inspection_text(inspection, width=console.width_out))
    return inspection.exit_code


# Each question with the options that it needs and those that it takes.
QUESTION_NAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "best-arm": ((), ("error",)),
    "non-inferiority": ((), ("margin", "error", "baseline")),
    "target": (("target",), ("error",)),
    "steady": ((), ("tolerance", "error")),
    "memory": (("limit", "project_to_step"), ()),
    "scaling": (("devices",), ("limit", "error")),
    "faster": ((), ("error", "baseline")),
}
_OPTIONS = sorted(
    {name for groups in QUESTION_NAMES.values() for group in groups for name in group}
)
_EXIT = dict.fromkeys(("PASS", "WINNER", "TIE", "KEEP"), ProgramExit.GO)
_EXIT["INCONCLUSIVE"] = ProgramExit.INCOMPLETE


_NUMBER = number_type()
_DECIDE = option_table(
    f"""
    question QUESTION       {", ".join(QUESTION_NAMES)}
    file FILE               the numbers
    --target TOK_S          target: the floor in tok/s; needed, no default
    --error SHARE           declared error rate (default: 0.01 for best-arm, faster and scaling,
                            else 0.05)
    --margin SHARE          non-inferiority: accepted loss (default: 0.02)
    --limit X               memory: maximum in MiB; needed, no default. scaling: minimum efficiency,
                            a share (default: 0.90)
    --tolerance SHARE       steady: accepted change (default: 0.03)
    --devices N             scaling: number of devices; needed, no default
    --project-to-step STEP  memory: last production step; needed, no default
    --baseline ARM          which of two arms is the baseline (default: `baseline`)
    """,
    file={"metavar": "FILE.csv"},
    **dict.fromkeys(("target", "error", "margin", "limit", "tolerance"), _NUMBER),
    project_to_step=_NUMBER,
)


def _wrong_options(args: argparse.Namespace) -> list[str]:
    """Everything wrong with the combination of question and options."""
    if args.question not in QUESTION_NAMES:
        near = did_you_mean(args.question, QUESTION_NAMES)
        return [f"unknown question {args.question!r}{near}; allowed: {', '.join(QUESTION_NAMES)}"]
    required, optional = QUESTION_NAMES[args.question]
    takes = (*required, *optional)
    given = _given(args)
    missing = [] if args.misread else [name for name in required if name not in given]
    found = [f"{args.question} needs {_flag(name)}" for name in missing]
    words = ", ".join(map(_flag, takes)) or "no option"
    return found + [
        f"{args.question} does not take {_flag(name)}; it takes {words}"
        for name in given
        if name not in takes
    ]


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@command(
    "answer one question about any CSV file at a declared error rate",
    arguments=_DECIDE,
    problems=_wrong_options,
)
def decide(args: argparse.Namespace, console: Console) -> int:
    """Answer one question about the numbers in a CSV file (with a header), at a declared error
    rate.

    question         columns                                 asks
    best-arm         arm,block,value                         which arm beats all others?
    non-inferiority  baseline,variant (a row per round)      is the variant at most 2 % slower?
    faster           a,b (a row per round)                   is a faster than b?
    target           value (a row per LAUNCH)                is --target reached?
    steady           dt_s (a row per step)                   does the step time stay level?
    memory           step,mem_mib                            has memory stopped growing?
    scaling          t1,tN (a row per pair of launches)      is T_N / (N T_1) at least 0.90?

    A value is tokens / time of a whole block or launch, never a mean of rates. best-arm,
    non-inferiority and faster also take arm,block,value of two arms (--baseline names the
    first), or this program's training.csv with its columns arm, block, tokens and dt_s.

    examples:
      runbook decide best-arm blocks.csv
      runbook decide target launches.csv --target 39
      runbook decide memory training.csv --limit 61440 --project-to-step 50000 --json
    exit codes: 0 PASS, WINNER, TIE, KEEP; 1 FAIL, DROP, INVALID; 2 usage; 3 INCONCLUSIVE
    """
    from runbook.tools.decide import QUESTIONS, read_table

    table = read_table(args.file)
    decision = QUESTIONS[args.question](table, _given(args))
    code = _EXIT.get(decision.outcome.value, ProgramExit.NO_GO)
    if args.json:
        head = {"schema_version": 1, "question": args.question, "file": table.name}
        facts = {"sha256": table.sha256, "rows": len(table.rows)}
        console.json_document(head | facts | decision.to_dict())
        return code
    word = decision.outcome.value
    winner = f" {decision.winner}" if decision.winner else ""
    console.answer(word, winner)
    for line in _decision_lines(decision):
        console.result(f"  {line}")
    console.result(f"  declared error {decision.error_rate:g}; {args.question}, {table.name}")
    return code


def _decision_lines(decision: Decision) -> Iterator[str]:
    yield decision.reason
    if decision.interval is not None:
        low, high = decision.interval
        yield (
            f"estimate {decision.estimate:.5g} ({low:.5g} to {high:.5g}) {decision.unit},"
            f" n = {decision.n}"
        )


@command(
    "judge a hand-written table of results by the same rules",
    arguments=option_table("file FILE.yaml  a file, or the name of a shipped one"),
)
def replay(args: argparse.Namespace, console: Console) -> int:
    """Judge the numbers of a report (phases, arms, rows and configs, in YAML) by the
    rules of a run, and list every contradiction with the rule it breaks. The reports
    that this program replaces are shipped: report_v4 and first_report.

    examples:
      runbook replay report_v4
      runbook replay my_report.yaml --json
    exit codes: 0 GO, 1 NO-GO, 2 usage, 3 INCOMPLETE
    """
    from runbook.tools.replay.judge import judge_report
    from runbook.tools.replay.report import load_report

    report, path, sha256 = load_report(args.file)
    judgement = judge_report(report)
    if args.json:
        head: dict[str, Any] = {"schema_version": 2, "file": str(path), "sha256": sha256}
        console.json_document(head | judgement.model_dump(mode="json"))
    else:
        _print_judgement(console, judgement, str(path))
    return judgement.verdict.exit_code


def _print_judgement(console: Console, judgement: ReplayRecord, path: str) -> None:
    claim = f"  {judgement.title} (the report says {judgement.claimed_verdict})"
    console.answer(judgement.verdict.value, claim)
    console.result(f"judged from {path}; {judgement.source}", "")
    count = len(judgement.contradictions)
    console.result(f"{count or 'no'} contradiction{'' if count == 1 else 's'}")
    for number, item in enumerate(judgement.contradictions, start=1):
        console.result(
            f"{number:3}. {item.rule} [{item.phase}] {item.outcome.value}",
            f"     claimed: {item.claimed}",
            f"     found:   {item.found}",
            f"     rule:    {item.rule_text}",
        )
