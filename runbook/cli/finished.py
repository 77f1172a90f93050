"""What lies on a disk, asked and told: finished runs, any run directory, a hand-written report."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.cli._parser import command, file_problems
from runbook.cli._runs import find_run, folder_of, load_told, print_made, running_line
from runbook.console import Console, marked, table_of
from runbook.errors import ProgramExit, UsageError, choice_for, how_many
from runbook.files import typed_here, write_atomic, written_to
from runbook.folder import RECORD_FILE, run_folders

if TYPE_CHECKING:
    from runbook.records import RunRecord
    from runbook.tools.export import MetricRow, RunRow
    from runbook.tools.replay.judge import ReplayRecord

_DEFAULT_FORMAT = "terminal"


def _unknown_format(args: argparse.Namespace) -> list[str]:
    from runbook.config.registry import REPORT_GROUP, names

    if args.format is None:
        return []
    if args.json:
        return ["--json and --format: choose one"]
    if args.format == "json":
        return ["--format json: there is none; --json prints run.json, the record"]
    known = names(REPORT_GROUP)
    if args.format in known:
        return []
    return [f"--format {args.format!r}: no such format{choice_for(args.format, known)}"]


def _print(console: Console, record: RunRecord, fmt: str) -> None:
    from runbook.engine.derive import render
    from runbook.folder.manifest import record_text
    from runbook.records.run import Screen

    screen = Screen(color=console.color_out, width=console.width_out, program=typed_here())
    console.page(record_text(record) if console.as_json else render(record, fmt, screen))


@command(
    "render a run's report again",
    json_help="the record: run.json as it is (docs/run.schema.json)",
    problems=_unknown_format,
)
def report(args: argparse.Namespace, console: Console) -> int:
    """Render a run again from its run.json, on stdout.

    options:
      run_name [RUN]
      --out DIR
      --format FORMAT  md, details, html, junit, ctrf, nodes, terminal or github (default: terminal)

    examples:
      runbook report                                the newest run, on the terminal
      runbook report --format md > report.md
      runbook report 20261121T010203Z-840303b --format junit > junit.xml
    exit codes: 0 whatever the verdict, 2 usage, 3 the run still goes on, or run.json changed since
    """
    from runbook.engine.derive import untrusted

    folder = find_run(args.run_name, args.out)
    fmt, running = args.format or _DEFAULT_FORMAT, running_line(folder)
    if running and fmt == _DEFAULT_FORMAT:
        console.result(running)
        return ProgramExit.INCOMPLETE
    if running:
        console.error(running)
    record, why = load_told(folder, console)
    record = untrusted(record, why) if why else record
    _print(console, record, fmt)
    if fmt == _DEFAULT_FORMAT and not args.json:
        print_made(console, folder, record)
    return ProgramExit.INCOMPLETE if why or running else ProgramExit.GO


def _fingerprint_problems(args: argparse.Namespace) -> list[str]:
    from runbook.folder.manifest import FINGERPRINT_DIGITS

    told = args.fingerprint
    if not told or re.fullmatch(rf"[0-9a-fA-F]{{{FINGERPRINT_DIGITS},64}}", told):
        return []
    wanted = f"{FINGERPRINT_DIGITS} to 64 digits (0-9, a-f)"
    return [f"--fingerprint {told!r} is not a fingerprint; allowed: {wanted}, as printed"]


@command(
    "recompute every number of a run from its artifacts",
    options={"fingerprint": ""},
    problems=_fingerprint_problems,
)
def verify(args: argparse.Namespace, console: Console) -> int:
    """Read and judge a finished run again and compare: the digest of every file, run.json
    against its journal, every check and measurement against the artifacts, every report
    against a fresh rendering. Changes nothing.

    options:
      run_name [RUN]
      --out DIR
      --fingerprint DIGITS  what the run printed at its end, kept elsewhere: the record has to be
          that one, so that a forgery of all files is seen (default: the folder is held against
          itself only)

    examples:
      runbook verify                              the newest run
      runbook verify artifacts/20261121T010203Z-840303b
      runbook verify RUN --fingerprint DIGITS     it is the record that the run ended with
    exit codes: 0 nothing differs, 1 something does (each difference is named), 2 usage,
    3 the run still goes on
    """
    from runbook.engine.verify import verify_run
    from runbook.folder.manifest import shown_fingerprint

    folder = find_run(args.run_name, args.out)
    if running := running_line(folder):
        document = {"schema_version": 1, "ok": False, "running": running}
        console.tell(document, [f"{running}; nothing to verify yet"])
        return ProgramExit.INCOMPLETE
    found = verify_run(folder, fingerprint=args.fingerprint)
    lines = [f"DIFFERS  {difference}" for difference in found.differences]
    lines += [f"note  {note}" for note in found.notes]
    checked = (
        f"{found.files} files, {found.checks} checks, {found.measurements} measurements, "
        f"{len(found.reports)} reports"
    )
    if found.ok:
        lines.append(f"verified {found.run_id}: {checked}; nothing differs")
        held = "the one asked for" if args.fingerprint else "hold it against the one kept elsewhere"
        lines.append(f"fingerprint  {shown_fingerprint(found.fingerprint)} ({held})")
    else:
        differ = how_many(len(found.differences), "difference")
        lines.append(f"NOT VERIFIED {found.run_id}: {differ} ({checked})")
    console.tell({"schema_version": 1, "ok": found.ok, **asdict(found)}, lines)
    return ProgramExit.GO if found.ok else ProgramExit.NO_GO


@command(
    "judge a finished run again under other limits",
    json_help="the record as judged now, in the form of run.json",
    options={"profile": ""},
    problems=_unknown_format,
)
def judge(args: argparse.Namespace, console: Console) -> int:
    """Judge the artifacts of a finished run by the limits of another profile. Starts
    nothing and changes nothing; the report goes to stdout.

    options:
      run_name [RUN]
      --out DIR
      --profile NAME|FILE  the limits to judge by (default: those of the run)
      --format FORMAT      md, details, html, junit, ctrf, nodes, terminal or github
                           (default: terminal)

    examples:
      runbook judge --profile a100x2_pcie3
      runbook judge 20261121T010203Z-840303b --profile mine.yaml --format md
    exit codes: 0 GO, 1 NO-GO, 2 usage, 3 INCOMPLETE, 4 PARTIAL PASS
    """
    from runbook.config.load import load_profile, load_profile_document
    from runbook.config.setup import setup_of_record
    from runbook.engine.derive import untrusted
    from runbook.engine.verify import judged

    folder = find_run(args.run_name, args.out)
    record, why = load_told(folder, console)
    if args.profile:
        profile = load_profile(args.profile)
    else:
        profile = load_profile_document(record.profile_document, where=RECORD_FILE)
    setup = setup_of_record(record, profile=profile, named=args.profile)
    again = judged(record, folder, setup)
    again = untrusted(again, why) if why else again
    _print(console, again, args.format or _DEFAULT_FORMAT)
    return again.verdict.exit_code


def _compare_problems(args: argparse.Namespace) -> list[str]:
    if args.b is None:
        names = ", ".join(folder.name for folder in run_folders(args.out)[-5:]) or "none"
        return [f"name the two runs to compare; in {args.out}/ there are: {names}"]
    return []


@command(
    "compare two finished runs: are they comparable, and what changed", problems=_compare_problems
)
def compare(args: argparse.Namespace, console: Console) -> int:
    """Compare run B with the reference A: what differs, which checks and numbers changed.
    Comparable are runs of the same work of which one thing differs: code, software, machine
    or toggles. Only what both ran is compared. B is worse where a required check passed in A
    only; whether it is slower than accepted runs, its own rows say.

    options:
      a [A]        the reference: a run's folder or id (no default)
      b [B]        the run to judge (no default)
      --out DIR

    examples:
      runbook compare 20261120T010203Z-840303b 20261121T010203Z-aa84eda
      runbook compare artifacts/20261120T010203Z-840303b 20261121 --json > both.json
    exit codes: 0 nothing worse, 1 worse, 2 usage, 3 not comparable
    """
    from runbook.folder.manifest import load_record
    from runbook.tools.compare import compare_runs, comparison_lines

    first, second = (find_run(name, args.out) for name in (args.a, args.b))
    a, b = (load_record(folder) for folder in (first, second))
    found = compare_runs(a, first, b, second)
    console.tell(found.document(), comparison_lines(found))
    return found.exit_code


@command("list earlier runs, or one number through all of them")
def history(args: argparse.Namespace, console: Console) -> int:
    """List the runs of a folder, oldest first. With METRIC (a check's id, or
    phase/measurement), its value in each, with the profile, devices and settings that it is of:
    only numbers of like runs can be compared.

    options:
      metric [METRIC]  a check or a measurement (default: list the runs)
      --out DIR

    examples:
      runbook history
      runbook history baseline.throughput
    """
    from runbook.tools.export import read_history

    if not args.out.is_dir():
        raise UsageError(
            f"no folder {args.out}/", hint="`runbook run` creates it, --out names another"
        )
    runs, numbers = read_history(args.out)
    if args.metric is None:
        _show_runs(console, runs)
    else:
        _show_metric(console, args, numbers)
    return 0


def _show_runs(console: Console, rows: Sequence[RunRow]) -> None:
    from runbook.records.measurement import duration_text, json_ready, plain_number

    cells = [
        (
            row.started_at or "-",
            row.run_id,
            row.profile or "-",
            row.verdict or "-",
            f"{row.passed} of {row.required}",
            "-" if row.duration_s is None else duration_text(row.duration_s),
            plain_number(row.throughput),
            "; ".join(row.marks),
        )
        for row in rows
    ]
    header = ("STARTED", "RUN", "PROFILE", "VERDICT", "REQUIRED PASSED", "TOOK", "TOK/S", "")
    document = json_ready({"schema_version": 2, "runs": [asdict(row) for row in rows]})
    console.tell(document, [table_of(header, cells, styled=3)])


def _show_metric(console: Console, args: argparse.Namespace, numbers: Sequence[MetricRow]) -> None:
    from runbook.records.measurement import json_ready

    rows = [one for one in numbers if one.name == args.metric]
    if not rows:
        names = sorted({one.name for one in numbers})
        known = choice_for(args.metric, names) if names else "; no run has recorded any"
        raise UsageError(f"no metric {args.metric!r} in {args.out}/{known}")
    header = ("STARTED", "RUN", "PROFILE", "ON", "VERDICT", "OUTCOME", "VALUE", "N", "SOURCE")
    document = {"schema_version": 4, "metric": args.metric, "rows": [asdict(row) for row in rows]}
    console.tell(json_ready(document), [table_of(header, map(_cells, rows), styled=4)])


def _cells(row: MetricRow) -> tuple[str, ...]:
    value = row.text if row.value is None else f"{row.value:.6g}"
    spread = f" +- {row.stdev:.3g}" if row.stdev is not None else ""
    unit = f" {row.unit}" if row.unit else ""
    return (
        row.started_at,
        row.run_id,
        row.profile,
        row.on_what or "-",
        row.verdict,
        row.outcome or "-",
        f"{value}{spread}{unit}",
        str(row.n),
        row.path or "-",
    )


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
    from runbook.tools.export import csv_text, numbers_of, prometheus_text

    folder = find_run(args.run_name, args.out)
    record, why = load_told(folder, console)
    if why:
        raise UsageError(
            f"{folder / RECORD_FILE} {why}: nothing is exported of it",
            hint=f"`runbook verify {folder.name}` names what differs",
        )
    is_table = args.to.suffix == ".csv"
    text = csv_text(numbers_of(record)) if is_table else prometheus_text(record)
    with written_to("--to", args.to):
        write_atomic(args.to, text)
    document = {"schema_version": 2, "run_id": record.run_id, "written": str(args.to)}
    console.tell(document, [str(args.to)])
    return ProgramExit.GO
