"""`runbook run --dry-run`: every command line, how long it may take, and what feeds what."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runbook.cli._estimate import Estimate, Estimator
from runbook.cli._headline import short_duration
from runbook.cli._paste import pasteable
from runbook.console import Console, console_for

if TYPE_CHECKING:
    from phases.base import Phase
    from runbook.engine import RunOptions
    from runbook.records import Launch

__all__ = ["print_plan"]

Plan = Sequence[tuple["Phase", Sequence["Launch"]]]


def print_plan(options: RunOptions, args: argparse.Namespace) -> int:
    """Print the plan; start nothing, write nothing, judge nothing."""
    from runbook.engine import plan_all

    plan = plan_all(options)
    estimator = Estimator(args.chosen_profile, options.out)
    console = console_for(args)
    if args.json:
        console.json_document(_document(plan, options, args, estimator))
    else:
        _print(console, plan, options, args, estimator)
    return 0


def _print(
    console: Console,
    plan: Plan,
    options: RunOptions,
    args: argparse.Namespace,
    estimator: Estimator,
) -> None:
    profile = args.chosen_profile
    console.result("# dry run: nothing is started, nothing is judged")
    console.result(f"# profile  {profile.name} ({args.profile_reason})")
    console.result(f"# scope    {profile.scope}")
    console.result(f"# folder   {options.out}/<UTC time>-<commit>/")
    everything: list[Estimate] = []
    for index, (phase, launches) in enumerate(plan, start=1):
        console.result("")
        console.result(f"# {index}/{len(plan)} {phase.name}: {phase.question}")
        console.result(f"#   source  {phase.source}")
        for line in _feeding(phase, plan):
            console.result(f"#   {line}")
        if phase.collects:
            console.result("#   collects facts of checkout, torch, GPUs, disk, ports, processes")
        if not launches:
            console.result("#   starts no process")
        for launch in launches:
            estimate = estimator.estimate(launch)
            everything.append(estimate)
            purpose = f": {launch.purpose}" if launch.purpose else ""
            console.result(f"#   {launch.name}{purpose}")
            console.result(f"#   {estimate.text}; stopped after {short_duration(launch.timeout_s)}")
            for note in pasteable(launch).notes:
                console.result(f"#   {note}")
            console.result(pasteable(launch).line)
    console.result("")
    console.result(f"# in all  {_total(everything)}")


def _feeding(phase: Phase, plan: Plan) -> list[str]:
    """What this phase takes from others, and which others take from it."""
    running = {other.name for other, _ in plan}
    lines = []
    if taken := [name for name in phase.reads if name in running]:
        lines.append(f"uses    {', '.join(taken)} (what it chose or measured)")
    if absent := [name for name in phase.reads if name not in running]:
        lines.append(f"without {', '.join(absent)} (not in this run)")
    if readers := [other.name for other, _ in plan if phase.name in other.reads]:
        lines.append(f"feeds   {', '.join(readers)}")
    return lines


def _total(estimates: Sequence[Estimate]) -> str:
    count = f"{len(estimates)} launch{'' if len(estimates) == 1 else 'es'}"
    limit = short_duration(sum(estimate.timeout_s for estimate in estimates))
    known = [estimate.seconds for estimate in estimates if estimate.seconds is not None]
    if not known:
        return f"{count}, at most {limit}"
    missing = len(estimates) - len(known)
    without = f" without the {missing} that have no estimate" if missing else ""
    return f"{count}, about {short_duration(sum(known))}{without}, at most {limit}"


def _document(
    plan: Plan, options: RunOptions, args: argparse.Namespace, estimator: Estimator
) -> dict[str, object]:
    return {
        "schema_version": 1,
        "dry_run": True,
        "profile": options.profile,
        "profile_reason": args.profile_reason,
        "scope": args.chosen_profile.scope,
        "out_dir": str(options.out),
        "phases": [
            {
                "name": phase.name,
                "question": phase.question,
                "source": phase.source,
                "reads": list(phase.reads),
                "collects": phase.collects,
                "launches": [_launch_document(launch, estimator) for launch in launches],
            }
            for phase, launches in plan
        ],
    }


def _launch_document(launch: Launch, estimator: Estimator) -> dict[str, object]:
    estimate = estimator.estimate(launch)
    return {
        **launch.model_dump(mode="json"),
        "command": pasteable(launch).line,
        "notes": list(pasteable(launch).notes),
        "estimate_s": estimate.seconds,
        "estimate": estimate.text,
    }
