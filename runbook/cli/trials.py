"""Trials: `init` probes a trainer of one's own, `drill` injects faults, `triage` finds a cause."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from runbook import DEFAULT_OUT
from runbook.cli._parser import command, number_type, whole_type
from runbook.cli._runs import find_run
from runbook.console import Console, table_of
from runbook.errors import ProgramExit, UsageError
from runbook.files import make_new_dir, page, utc_stamp, write_atomic

if TYPE_CHECKING:
    from runbook.records.own_trainer import OwnTrainer
    from runbook.tools.drill import DrillReport, DrillRow
    from runbook.tools.triage import StepResult, Target


_HEAD = """\
# How {name} is started and where its numbers stand, guessed from a probe of {steps} steps.
# What each key means: {page}. What it does not say is {base}'s.
"""


def _init_problems(args: argparse.Namespace) -> list[str]:
    given = [one for one in (args.tokens_per_rank, args.tokens_per_step) if one is not None]
    odd = [f"--env {one!r}: expected NAME=VALUE" for one in args.env if "=" not in one]
    wanted = (
        "one of --tokens-per-rank and --tokens-per-step is needed: of one rank, sequences of a "
        "micro-batch x tokens of a sequence x accumulation (samples, if it has no tokens)"
    )
    return odd if len(given) == 1 or (args.misread and not given) else [*odd, wanted]


@command(
    "write a profile for a trainer of your own, from a probe of seconds",
    options={
        "trainer": {"required": True},
        "profile": "auto",
        "steps": {"type": whole_type(at_least=5), "default": 30},
        "within": {"type": number_type(above=0), "default": 120.0},
        "env": {"action": "append", "default": []},
    },
    problems=_init_problems,
)
def init(args: argparse.Namespace, console: Console) -> int:
    """Run a trainer that is not ours for some steps, find the rows that it writes (a .csv, a
    .jsonl, or what it prints) and write a profile, NAME.yaml, by which `runbook run` starts,
    watches and judges it. What only the trainer's contract can prove is SKIPPED then, and the
    verdict says so.

    options:
      --trainer COMMAND  the command as you type it, in quotes; its steps, ranks and output folder
          are found by their usual flags, or where you put {steps}, {ranks}, {out} (default: none,
          needed)
      --tokens-per-rank N  tokens (or samples) that one rank reads in one optimizer step: sequence
          length x batch of one rank x accumulation (default: none; this or --tokens-per-step is
          needed)
      --tokens-per-step N  tokens of all ranks together, where the batch does not grow with them
          (default: none)
      --name NAME         what to call it (default: after its script)
      --profile NAME      the shipped profile of the machine that it extends (default: auto)
      --ranks N           ranks (default: the profile's)
      --steps N           steps of each of its two starts (default: 30)
      --within SECONDS    seconds that one start may take (default: 120)
      --env NAME=VALUE    a variable of every launch, which gets few of this shell's; repeatable
          (default: none)
      --pattern REGEX     a row on its console, where none is found, by our names, such as
          'at (?P<step>[0-9]+): cost (?P<loss>.+)' (default: those that are known)
      --heartbeats PATH:FIELD  JSON lines that each rank writes, such as
          '{out}/alive_{rank}.jsonl:step' (default: none)
      --out DIR           where the probe is kept (default: artifacts)

    examples:
      runbook init --tokens-per-rank 4096 --trainer 'torchrun --nproc_per_node=2 t.py --max_steps 9'
      runbook init --tokens-per-step 512 --ranks 2 --trainer 'python t.py --gpus 2 --iters {steps}'
    exit codes: 0 written, 2 wrong usage, or a trainer that does not run or writes nothing
    """
    import yaml

    from runbook.config.load import load_profile
    from runbook.config.precedence import dropped
    from runbook.launch.observer import StopRequest, stop_on_signals
    from runbook.machine.gpu import detect_profile
    from runbook.records.own_trainer import RANKS
    from runbook.tools.own_profile import document_of, run_probe, templated

    command = templated(args.trainer)
    name = args.name or _name_of(command)
    target = Path(f"{name}.yaml")
    if target.exists():
        raise UsageError(f"{target} is there already", hint="remove it, or give another --name")
    base = detect_profile()[0] if args.profile == "auto" else args.profile
    profile = load_profile(base)
    ranks = (args.ranks or profile.ranks) if RANKS in command else 1
    trainer = _trainer(args, command, name)
    folder = args.out / f"init-{utc_stamp()}"
    make_new_dir("--out", folder)
    if text := dropped(os.environ, trainer):
        console.progress(f"not passed on: {text}")
    console.progress(f"probe: {args.steps} steps on {ranks} rank(s), in {folder}")
    with stop_on_signals(StopRequest()) as stop:
        probe = run_probe(
            trainer,
            ranks=ranks,
            steps=args.steps,
            seconds=args.within,
            folder=folder,
            variables=profile.variables,
            stop=stop,
        )
    document = document_of(probe, base=base, ranks=ranks)
    head = _HEAD.format(name=name, steps=args.steps, base=base, page=page("your-trainer"))
    write_atomic(target, head + yaml.safe_dump(document, sort_keys=False, width=100))
    told = [
        *probe.notes,
        *guessed(probe.trainer, target),
        f"a step took about {probe.step_s:.2g} s; {len(document['required'])} checks",
        f"wrote {target}; read it, then: runbook run --profile ./{target}",
    ]
    console.tell({"schema_version": 1, "profile": str(target), **document}, told)
    return ProgramExit.GO


def guessed(trainer: OwnTrainer, target: Path) -> Iterator[str]:
    """What was read as what, and what the command does not say."""
    from runbook.records.own_trainer import OUT, RANKS

    said = ", ".join(f"{ours} is {theirs}" for ours, theirs in trainer.log.columns.items())
    yield said or f"read from such lines: {', '.join(trainer.log.names)} (pattern in {target})"
    if RANKS not in trainer.command:
        yield f"no number of ranks was found in the command: put {RANKS} there, to know its scaling"
    elif not trainer.single:
        yield (
            f"single_gpu starts it on 1 rank: devices that the script names have to follow {RANKS} "
            f"or WORLD_SIZE; else put the command for one rank under `single` in {target}"
        )
    if OUT not in trainer.command:
        yield (
            f"no output folder was found in the command: put {OUT} there if it writes any files, "
            "so that each launch has a new one"
        )
    each = "a rank" if trainer.tokens_per_rank else "all ranks"
    tokens = trainer.tokens_per_rank or trainer.tokens_per_step
    yield f"{tokens} tokens a step of {each}, as you say: nothing can check it"


def _trainer(args: argparse.Namespace, command: str, name: str) -> OwnTrainer:
    from pydantic import ValidationError

    from runbook.records.own_trainer import RANKS, HeartbeatMap, LogMap, OwnTrainer

    path, _, field = (args.heartbeats or "").rpartition(":")
    try:
        return OwnTrainer(
            name=name,
            command=command,
            single="" if RANKS in command else command,
            tokens_per_rank=args.tokens_per_rank,
            tokens_per_step=args.tokens_per_step,
            heartbeats=HeartbeatMap(path=path, step=field) if args.heartbeats else None,
            env=dict(one.split("=", 1) for one in args.env),
            log=LogMap(pattern=args.pattern) if args.pattern else LogMap(columns={"loss": "loss"}),
            source="runbook init",
        )
    except ValidationError as error:
        problems = [detail["msg"].removeprefix("Value error, ") for detail in error.errors()]
        raise UsageError([f"--trainer: {text}" for text in problems]) from error


def _name_of(command: str) -> str:
    """After its script, or the module behind -m; else the program."""
    words = shlex.split(command)
    script = next((Path(word).stem for word in words if word.endswith((".py", ".sh"))), "")
    module = words[words.index("-m") + 1].rpartition(".")[2] if "-m" in words[:-1] else ""
    return re.sub(r"\W+", "_", script or module or Path(words[0]).name).strip("_").lower()


_HEADER = ("FAULT", "SECONDS", "ALLOWED", "FILES OF EVIDENCE", "OK")


@command(
    "inject faults into real two-rank runs: is each noticed, named and cleaned up?",
    options={"faults": "all", "out": {"default": None}},
)
def drill(args: argparse.Namespace, console: Console) -> int:
    """Inject each fault into a real run of the trainer on two CPU ranks, with budgets of 3 s:
    crashes, hangs, frozen ranks, desynchronized collectives, stragglers, data stalls,
    bad numbers, full memory and disks, torn files, clock jumps, taken ports, killed
    launchers. A row passes if the fault was noticed in time, the right rank was named,
    the evidence is there, no process is left and no written row is lost.

    options:
      --faults LIST  comma-separated names, or all (default)
      --list         list the faults and stop
      --out DIR      new folder (default: artifacts/drill-<time>)

    examples:
      runbook drill --list
      runbook drill --faults frozen,sigkill,nan
      runbook drill --json > drill.json
    exit codes: 0 every row passed, 1 a row failed, 2 usage, 3 interrupted
    """
    from runbook.launch.observer import StopRequest, stop_on_signals
    from runbook.tools.drill import run_drill, select

    faults = select(args.faults)
    if args.list:
        rows = [{"fault": f.name, "title": f.title, "limit_s": f.limit_s} for f in faults]
        cells = [(f.name, f.status.value, f"{f.limit_s:g} s", f.title) for f in faults]
        table = table_of(("FAULT", "ENDS AS", "WITHIN", "WHAT IS INJECTED"), cells)
        console.tell({"schema_version": 1, "faults": rows}, [table])
        return 0
    out = args.out or Path(DEFAULT_OUT) / f"drill-{utc_stamp()}"
    number = count(1)

    def told(row: DrillRow) -> None:
        word = "good" if row.ok else "FAILED: " + "; ".join(row.problems)
        took = "" if row.seconds is None else f" {row.seconds:.2f} s"
        console.progress(f"[{next(number)}/{len(faults)}] {row.fault}{took} {word}")

    with stop_on_signals(StopRequest()) as stop:
        report = run_drill(faults, out.resolve(), stop=stop, on_row=told)
    _print(console, report)
    if report.interrupted:
        return ProgramExit.INCOMPLETE
    return ProgramExit.GO if report.ok else ProgramExit.NO_GO


def _print(console: Console, report: DrillReport) -> None:
    summary = report.summary()
    bad = [f"{r.fault}: {'; '.join(r.problems)} ({r.cause})" for r in report.rows if not r.ok]
    text = (
        "{good} of {faults} good ({kinds} kinds); culprit right {culprit_right} of {culprit_of}; "
        "after the threshold {median_over_threshold_s} s median, {max_over_threshold_s} s at most; "
        "{orphans} orphans, {rows_lost} rows lost"
    )
    document = {"summary": summary, "rows": [row.document() for row in report.rows]}
    table = table_of(_HEADER, [_cells(row) for row in report.rows])
    console.tell({"schema_version": 1, **document}, [table, *bad, text.format_map(summary)])


def _cells(row: DrillRow) -> tuple[str, ...]:
    return (
        row.fault,
        "-" if row.seconds is None else f"{row.seconds:.2f}",
        "-" if row.limit_s is None else f"{row.limit_s:g}",
        str(len(row.evidence)),
        "yes" if row.ok else "NO",
    )


_EXIT = {"found": ProgramExit.GO, "nothing_helped": ProgramExit.NO_GO}


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
    from runbook.launch.observer import StopRequest, stop_on_signals
    from runbook.tools.triage import run_steps

    target = _target(args)
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
    return _EXIT.get(triage.outcome, ProgramExit.INCOMPLETE)


def _target(args: argparse.Namespace) -> Target:
    """The launch to repeat, which keeps its own variables."""
    from runbook.config.settings import parse_settings
    from runbook.tools.triage import find_target, with_choices

    typed, named = parse_settings(args.settings), args.target
    path = Path(named) if named and Path(named).exists() else find_run(named, args.out)
    target = find_target(path, floor=args.floor)
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
