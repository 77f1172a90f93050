"""Numbers of others judged, a failure asked for its cause, and a run's numbers for others.

`inspect`, `replay`, `triage` and `export`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.cli._parser import command, file_problems, number_type
from runbook.cli._runs import find_run, folder_of, load_told, refuse_changed
from runbook.console import Console, marked, table_of
from runbook.errors import ProgramExit, choice_for
from runbook.text import how_many

if TYPE_CHECKING:
    from runbook.tools.replay.judge import ReplayRecord
    from runbook.tools.triage import StepResult, Target


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


_FORMATS = ("csv", "prometheus")
_STDOUT = "-"
# node_exporter reads no other file.
_COLLECTED = ".prom"


def _export_problems(args: argparse.Namespace) -> list[str]:
    if args.to is None:
        needed = f"--to is needed, for example --to csv numbers.csv; formats: {', '.join(_FORMATS)}"
        return [] if args.misread else [needed]
    name, target = args.to
    if name not in _FORMATS:
        return [f"--to {name}: no such format{choice_for(name, _FORMATS)}"]
    if target == _STDOUT:
        return []
    if name == "prometheus" and Path(target).suffix != _COLLECTED:
        return [f"--to {name} {target}: the collector reads only files that end in {_COLLECTED}"]
    return file_problems(f"--to {name}", Path(target))


@command(
    "write a run's numbers as CSV or for Prometheus",
    json_help="the path that was written, as one JSON document on stdout",
    options={"to": {"metavar": ("FORMAT", "PATH"), "nargs": 2}},
    problems=_export_problems,
)
def export(args: argparse.Namespace, console: Console) -> int:
    """Write the numbers of a run (see docs/exporting.md). Changes nothing in the run.

    csv         a row for each number: value, unit, n, spread, limit, outcome, file, digest
    prometheus  a file for node_exporter's textfile collector, replaced at once: verdict,
                checks by outcome, durations, every number and every limit; needs the
                package prometheus-client: pip install 'nsa-runbook[prometheus]'

    options:
      run_name [RUN]
      --out DIR
      --to FORMAT  csv FILE or prometheus FILE.prom; - is stdout; needed, no default

    examples:
      runbook export --to csv numbers.csv                      the newest run
      runbook export --to prometheus /var/lib/node_exporter/runbook.prom
      runbook export 20261121T010203Z-840303b --to csv -
    exit codes: 0 written; 2 usage, or run.json changed since the run: nothing is written
    """
    from runbook.files import write_atomic, written_to
    from runbook.tools.export import csv_text, numbers_of, prometheus_text

    folder, (name, target) = find_run(args.run_name, args.out), args.to
    record, why = load_told(folder, console)
    refuse_changed(folder, why, "nothing is exported of it")
    text = csv_text(numbers_of(record)) if name == "csv" else prometheus_text(record)
    if target != _STDOUT:
        with written_to(f"--to {name}", Path(target)):
            write_atomic(Path(target), text)
    if args.json:
        head = {"schema_version": 1, "run_id": record.run_id}
        console.json_document({**head, "exports": [{"format": name, "written": [target]}]})
    else:
        console.page(text if target == _STDOUT else target)
    return ProgramExit.GO


_EXIT = {
    "found": ProgramExit.GO,
    "nothing_helped": ProgramExit.NO_GO,
    "flaky": ProgramExit.INCOMPLETE,
    "not_reproduced": ProgramExit.INCOMPLETE,
    "interrupted": ProgramExit.INCOMPLETE,
}


@command(
    "run the failing command again with one change at a time, until it works",
    options={"floor": number_type(above=0)},
)
def triage(args: argparse.Namespace, console: Console) -> int:
    """Run the failing command unchanged, then with one change at a time, in the order of the
    operator's cheatsheet and the failure playbook, and stop at the first change that makes
    the failure go away. A change that helps is repeated, in turn with the command as it was,
    until chance would hardly look so. RUN is a run's folder or id (its first failed launch is
    taken), or a launch's directory.

    options:
      target [RUN]         default: the newest run
      --dry-run            show the steps; start nothing
      --floor TOK_S        triage low throughput: this many tok/s are fast enough (default: none)
      --set KEY=VALUE      a variable or config key that every try has, as for `runbook run`;
                           repeatable (default: none)
      --steps N            steps of each try (default: 30, or past the failing step)
      --out DIR

    examples:
      runbook triage                        the newest run
      runbook triage --dry-run artifacts/20260131T120000Z-1a2b3c4
      runbook triage --floor 39 artifacts/20260131T120000Z-1a2b3c4/baseline/run1
    exit codes: 0 a step helped, 1 none did, 2 usage, 3 it did not fail again, or comes and goes
    """
    from runbook.files import utc_stamp
    from runbook.launch import StopRequest, stop_on_signals
    from runbook.tools.triage import run_steps

    target = _target(args, console)
    if args.dry_run:
        _show_steps(console, target)
        return 0
    out = (args.out / f"triage-{utc_stamp()}").resolve()
    console.progress(f"triage of {target.why}; evidence in {out}")

    def tell(result: StepResult) -> None:
        console.progress(f"{result.name}: {result.outcome}: {result.detail}")

    with stop_on_signals(StopRequest()) as stop:
        triage = run_steps(target, out, stop=stop, tell=tell)
    rows = [(r.name, r.outcome, r.source, r.detail) for r in triage.steps]
    table = table_of(("STEP", "OUTCOME", "SOURCE", "WHAT HAPPENED"), rows)
    console.tell(triage.document(), [table, f"finding: {triage.finding}", *triage.exports])
    return _EXIT[triage.outcome]


def _target(args: argparse.Namespace, console: Console) -> Target:
    """The launch to repeat, which keeps its own variables."""
    from runbook.config.precedence import differing, shell_settings
    from runbook.config.settings import parse_settings
    from runbook.tools.triage import find_target, with_choices

    typed, named = parse_settings(args.settings), args.target
    path = Path(named) if named and Path(named).exists() else find_run(named, args.out)
    target = find_target(path, floor=args.floor)
    if found := list(differing(target.launch.env, {}, shell_settings(os.environ))):
        console.error(f"warning: the failing launch keeps its variables: {'; '.join(found)}")
    return with_choices(target, typed, steps=args.steps)


def _show_steps(console: Console, target: Target) -> None:
    from runbook.launch.command import pasteable
    from runbook.tools.triage_steps import AS_IT_WAS, STEPS, applied

    rows = []
    for number, step in enumerate(STEPS[target.symptom], start=1):
        launch = applied(step, target.launch, name=step.name, steps=target.steps)
        skipped = "" if step.changes(target.launch) else "skipped: it would change nothing"
        rows.append(
            {"step": number, "name": step.name, "title": step.title, "source": step.source}
            | {"command": pasteable(launch).line, "note": skipped}
        )
    first = pasteable(applied(AS_IT_WAS, target.launch, name="as_it_was", steps=target.steps))
    lines = [f"triage of {target.why} ({target.symptom})"]
    lines += [f"every try {note}" for note in first.notes]
    lines += ["0. the command as it was [it has to fail again]", f"   {first.line}"]
    for row in rows:
        lines.append(f"{row['step']}. {row['title']} [{row['source']}]")
        lines.append(f"   {row['note'] or row['command']}")
    console.tell({"schema_version": 1, "symptom": target.symptom, "steps": rows}, lines)
