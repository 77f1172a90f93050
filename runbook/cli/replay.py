"""`runbook replay`: judge a hand-written table of results by the rules of a run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from runbook.cli._parser import add_output_flags
from runbook.console import Console, console_for, printable, table

if TYPE_CHECKING:
    from runbook.tools.replay import ReplayRecord


_STYLE = {"GO": "good", "NO-GO": "bad", "INCOMPLETE": "unsure"}


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "replay",
        help="judge a hand-written table of results by the same rules",
        description=(
            "Judge the numbers of somebody's report (phases, arms, rows, configs, in YAML) by the\n"
            "rules of a run, and list every contradiction with the rule it breaks. The reports\n"
            "that this program replaces are shipped: report_v4 and first_report."
        ),
        epilog=(
            "examples:\n"
            "  runbook replay report_v4\n"
            "  runbook replay my_report.yaml --json\n"
            "exit codes: 0 GO, 1 NO-GO, 2 usage, 3 INCOMPLETE"
        ),
    )
    parser.add_argument("file", metavar="FILE.yaml", help="a file, or the name of a shipped one")
    add_output_flags(parser, json_help="one JSON document on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the judgement; the exit code is that of its verdict."""
    from runbook.tools.replay import judge_replay, load_replay

    replay, path, sha256 = load_replay(args.file)
    judgement = judge_replay(replay, path=str(path), sha256=sha256)
    console = console_for(args)
    if args.json:
        document = {"schema_version": 1, "file": str(path), "sha256": sha256}
        console.json_document(document | judgement.model_dump(mode="json"))
    else:
        _print(console, judgement, str(path))
    return judgement.verdict.exit_code


def _print(console: Console, judgement: ReplayRecord, path: str) -> None:
    verdict = judgement.verdict.value
    console.result(
        console.paint(verdict, _STYLE[verdict])
        + printable(f"  {judgement.title} (the report says {judgement.claimed_verdict})")
    )
    console.result(printable(f"judged from {path}; {judgement.source}\n"))
    rows = [
        (check.id, check.outcome.value, "" if check.required else "optional", check.reason)
        for check in judgement.checks
    ]
    console.result(table(("CHECK", "OUTCOME", "", "REASON"), rows))
    count = len(judgement.contradictions)
    console.result(f"\n{count} contradiction(s)" if count else "\nno contradictions")
    for number, item in enumerate(judgement.contradictions, start=1):
        console.result(
            printable(
                f"{number:3}. {item.rule} [{item.phase}] {item.outcome.value}\n"
                f"     claimed: {item.claimed}\n"
                f"     found:   {item.found}\n"
                f"     rule:    {item.rule_text}"
            )
        )
