"""`runbook triage`: the failing command again, with one change at a time."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runbook.cli._parser import add_output_flags
from runbook.console import Console, console_for, printable

if TYPE_CHECKING:
    from runbook.tools.triage import StepResult, Target, Triage


_EXIT = {"found": 0, "nothing_helped": 1, "not_reproduced": 3, "interrupted": 3}


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "triage",
        help="run the failing command again with one change at a time, until it works",
        description=(
            "Run the failing command as it was, then with one change at a time, in the order of\n"
            "the operator's cheat sheet and the failure playbook, and stop at the first change\n"
            "under which the failure is gone. RUN|CONFIG is a run's folder or id (its\n"
            "first failed launch is taken), a launch's directory, or a trainer config."
        ),
        epilog=(
            "examples:\n"
            "  runbook triage                        the newest run\n"
            "  runbook triage --dry-run configs/m7c_125m_2xa100_production.yaml\n"
            "  runbook triage --floor 39 artifacts/20260131T120000Z-1a2b3c4/baseline/run1\n"
            "exit codes: 0 a step helped, 1 none did, 2 usage, 3 it did not fail again"
        ),
    )
    parser.add_argument("target", metavar="RUN|CONFIG", nargs="?", help="default: the newest run")
    parser.add_argument("--dry-run", action="store_true", help="show the steps; start nothing")
    parser.add_argument(
        "--floor", metavar="TOK_S", type=_positive, help="triage low throughput: fast enough is"
    )
    parser.add_argument("--ranks", metavar="N", type=_whole, help="ranks for a config (2)")
    parser.add_argument(
        "--profile", metavar="NAME|FILE", help="ranks and variables for a config; alone: its config"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="a variable or config key that every try has, as for `runbook run`; repeatable",
    )
    parser.add_argument(
        "--steps", metavar="N", type=_whole, help="steps of each try (30; past the failing one)"
    )
    parser.add_argument("--out", metavar="DIR", default="artifacts", help="where runs are")
    add_output_flags(parser, json_help="one JSON document on stdout")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run the steps, or show them."""
    import time

    from runbook.launch import StopRequest, stop_on_signals
    from runbook.tools.triage import run_steps

    console = console_for(args)
    target = _target(args)
    if args.dry_run:
        _show_steps(console, target, as_json=args.json)
        return 0
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    out = (Path(args.out) / f"triage-{stamp}").resolve()
    console.progress(printable(f"triage of {target.why}; evidence in {out}"))

    def tell(result: StepResult) -> None:
        console.progress(printable(f"{result.name}: {result.outcome}: {result.detail}"))

    with stop_on_signals(StopRequest()) as stop:
        triage = run_steps(target, out, stop=stop, tell=tell)
    _show(console, triage, as_json=args.json)
    return _EXIT[triage.outcome]


def _target(args: argparse.Namespace) -> Target:
    from runbook.config import load_profile, parse_settings
    from runbook.tools.triage import find_target, with_choices

    settings = parse_settings(args.settings)
    profile = load_profile(args.profile) if args.profile else None
    path = _path(args.target or (profile.config if profile else None), Path(args.out))
    target = find_target(path, floor=args.floor, ranks=args.ranks, profile=profile)
    return with_choices(target, settings, steps=args.steps)


def _path(text: str | None, out: Path) -> Path:
    from runbook.cli._common import find_run
    from runbook.errors import RunbookError
    from runbook.launch.command import resolve_config

    if text is None:
        return find_run(None, out)
    if Path(text).exists():
        return Path(text)
    try:
        return resolve_config(text)
    except RunbookError:
        return find_run(text, out)


def _show_steps(console: Console, target: Target, *, as_json: bool) -> None:
    from runbook.launch.command import pasteable
    from runbook.tools.triage import STEPS, applied

    rows = []
    for number, step in enumerate(STEPS[target.symptom], start=1):
        launch = applied(step, target.launch, name=step.name, steps=target.steps)
        skipped = "" if step.changes(target.launch) else "skipped: the command does this already"
        rows.append((number, step, pasteable(launch).line, skipped))
    if as_json:
        found = [
            {"step": n, "name": r.name, "title": r.title, "source": r.source, "command": c,
             "note": s}
            for n, r, c, s in rows
        ]  # fmt: skip
        console.json_document({"schema_version": 1, "symptom": target.symptom, "steps": found})
        return
    first = pasteable(applied(None, target.launch, name="as_it_was", steps=target.steps))
    console.result(printable(f"triage of {target.why} ({target.symptom})"))
    for note in first.notes:
        console.result(printable(f"every try {note}"))
    console.result(f"0. the command as it was [it has to fail again]\n   {printable(first.line)}")
    for number, step, command, skipped in rows:
        console.result(f"{number}. {step.title} [{step.source}]")
        console.result(printable(f"   {skipped or command}"))


def _show(console: Console, triage: Triage, *, as_json: bool) -> None:
    from runbook.console import table

    if as_json:
        console.json_document(triage.document())
        return
    rows = [(r.name, r.outcome, r.source, r.detail) for r in triage.steps]
    console.result(printable(table(("STEP", "OUTCOME", "SOURCE", "WHAT HAPPENED"), rows)))
    console.result(printable(f"finding: {triage.finding}"))
    for line in triage.exports:
        console.result(printable(line))
