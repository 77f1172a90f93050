"""`runbook triage`: the failing command again, with one change at a time."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.cli._parser import command, number_type
from runbook.cli._runs import find_run
from runbook.console import Console, table_of
from runbook.errors import ProgramExit, RunbookError, UsageError

if TYPE_CHECKING:
    from runbook.tools.triage import StepResult
    from runbook.tools.triage_target import Target


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
    until chance would hardly look so. RUN|CONFIG is a run's folder or id (its first failed launch
    is taken), a launch's directory, or a trainer config.

    options:
      target [RUN|CONFIG]  default: the newest run
      --dry-run            show the steps; start nothing
      --floor TOK_S        triage low throughput: this many tok/s are fast enough (default: none)
      --ranks N            ranks for a config (default: 2)
      --profile NAME|FILE  ranks and variables for a config; without RUN|CONFIG, also the config
                           (default: none)
      --set KEY=VALUE      a variable or config key that every try has, as for `runbook run`;
                           repeatable (default: none)
      --steps N            steps of each try (default: 30, or past the failing step)
      --out DIR

    examples:
      runbook triage                        the newest run
      runbook triage --dry-run configs/m7c_125m_2xa100_production.yaml
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
    """The launch to repeat; a config has this shell's variables, a run keeps its own."""
    from nsa.contract import CONFIG_VARIABLE
    from runbook.config.load import load_profile
    from runbook.config.precedence import SHELL, differing, shell_settings, told
    from runbook.config.settings import parse_settings, variable_problems
    from runbook.tools.triage_target import CONFIG_ENDINGS, find_target, with_choices

    typed = parse_settings(args.settings)
    profile = load_profile(args.profile) if args.profile else None
    here = shell_settings(os.environ)
    default = here.get(CONFIG_VARIABLE, profile.config) if profile else None
    path = _path(args.target or default, args.out)
    target = find_target(path, floor=args.floor, ranks=args.ranks, profile=profile)
    if path.suffix not in CONFIG_ENDINGS:
        if found := list(differing(target.launch.env, {}, here)):
            console.error(f"warning: the failing launch keeps its variables: {'; '.join(found)}")
        return with_choices(target, typed, steps=args.steps)
    shell = {name: value for name, value in here.items() if name != CONFIG_VARIABLE}
    if problems := [f"in this shell: {text}" for text in variable_problems(shell)]:
        raise UsageError(problems)
    for text in told(shell, dict.fromkeys(shell, SHELL), profile.variables if profile else {}):
        console.progress(f"set {text}")
    typed = replace(typed, toggles={**shell, **typed.toggles})
    return with_choices(target, typed, steps=args.steps)


def _path(text: str | None, out: Path) -> Path:
    from runbook.launch.command import resolve_config
    from runbook.tools.triage_target import CONFIG_ENDINGS

    if text is None:
        return find_run(None, out)
    if Path(text).exists():
        return Path(text)
    try:
        return resolve_config(text)
    except RunbookError:
        if Path(text).suffix in CONFIG_ENDINGS:
            raise
        return find_run(text, out)


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
