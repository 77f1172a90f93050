"""Numbers of others judged, and a run's numbers for others: `inspect`, `replay` and `export`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.cli._parser import command, file_problems
from runbook.cli._runs import (
    find_run,
    folder_of,
    load_told,
    refuse_changed,
)
from runbook.console import Console, marked
from runbook.errors import ProgramExit
from runbook.text import how_many

if TYPE_CHECKING:
    from runbook.tools.replay.judge import ReplayRecord


@command("judge any run directory, read-only: what it holds and what is suspicious")
def inspect(args: argparse.Namespace, console: Console) -> int:
    """Judge a run directory without changing it: which runs its training.csv holds, which
    window its numbers come from, and everything suspicious. Reads this trainer's format
    and the older one: no header, step,loss,lr,toks_per_s, a row every k steps.

    options:
      directory DIR  a run's directory or id, or one CSV file

    examples:
      runbook inspect artifacts/m7c_125m_2xa100_prod
      runbook inspect old/training.csv
    exit codes: 0 nothing suspicious, 1 suspicious, 2 usage, 3 too little to say
    """
    from runbook.tools.inspect import inspection_parts
    from runbook.tools.inspect.folder import inspect_path

    inspection = inspect_path(folder_of(args.directory))
    console.tell(inspection.document(), inspection_parts(inspection))
    return inspection.exit_code


@command("judge a hand-written table of results by the same rules")
def replay(args: argparse.Namespace, console: Console) -> int:
    """Judge the numbers of a report (phases, arms, rows and configs, in YAML) by the
    rules of a run, and list every contradiction with the rule it breaks. The reports
    that this program replaces are shipped: report_v4 and first_report.

    options:
      file FILE.yaml  a file, or the name of a shipped one

    examples:
      runbook replay report_v4
      runbook replay my_report.yaml --json
    exit codes: 0 GO, 1 NO-GO, 2 usage, 3 INCOMPLETE
    """
    from runbook.tools.replay import load_report
    from runbook.tools.replay.judge import judge_report

    report, path, sha256 = load_report(args.file)
    judgement = judge_report(report)
    document = {"schema_version": 2, "file": str(path), "sha256": sha256}
    console.tell(document | judgement.model_dump(mode="json"), _lines(judgement, path, console))
    return judgement.verdict.exit_code


def _lines(judgement: ReplayRecord, path: Path, console: Console) -> Iterator[str]:
    claim = f"  {judgement.title} (the report says {judgement.claimed_verdict})"
    yield marked("", judgement.verdict.value, claim, color=console.color_out)
    yield from (f"judged from {path}; {judgement.source}", "")
    yield how_many(len(judgement.contradictions), "contradiction")
    for number, item in enumerate(judgement.contradictions, start=1):
        yield f"{number:3}. {item.rule} [{item.phase}] {item.outcome.value}"
        yield f"     claimed: {item.claimed}"
        yield f"     found:   {item.found}"
        yield f"     rule:    {item.rule_text}"


def _export_problems(args: argparse.Namespace) -> list[str]:
    if args.to.suffix not in (".csv", ".prom"):
        return [f"--to {args.to}: ends in neither .csv nor .prom, which say what is written"]
    return file_problems("--to", args.to)


@command(
    "write a run's numbers as CSV or for Prometheus",
    json_help="the path that was written, as one JSON document on stdout",
    options={"to": {"required": True}},
    problems=_export_problems,
)
def export(args: argparse.Namespace, console: Console) -> int:
    """Write the numbers of a run (see docs/exporting.md). Changes nothing in the run.

    FILE.csv   a row for each number: value, unit, n, spread, limit, outcome, file, digest
    FILE.prom  for node_exporter's textfile collector, replaced at once: the verdict, each required
               check, every number and every limit; needs the package prometheus-client:
               pip install 'nsa-runbook[prometheus]'

    options:
      run_name [RUN]
      --out DIR
      --to FILE  FILE.csv or FILE.prom, outside of the run (default: none, needed)

    examples:
      runbook export --to numbers.csv                          the newest run
      runbook export --to /var/lib/node_exporter/runbook.prom
      runbook export 20261121T010203Z-840303b --to numbers.csv
    exit codes: 0 written; 2 usage, or run.json changed since the run: nothing is written
    """
    from runbook.files import write_atomic, written_to
    from runbook.tools.export import csv_text, numbers_of, prometheus_text

    folder = find_run(args.run_name, args.out)
    record, why = load_told(folder, console)
    refuse_changed(folder, why, "nothing is exported of it")
    is_table = args.to.suffix == ".csv"
    text = csv_text(numbers_of(record)) if is_table else prometheus_text(record)
    with written_to("--to", args.to):
        write_atomic(args.to, text)
    document = {"schema_version": 2, "run_id": record.run_id, "written": str(args.to)}
    console.tell(document, [str(args.to)])
    return ProgramExit.GO
