"""`runbook run`: the phases, one after the other, and the verdict."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from runbook import DEFAULT_LAUNCHER
from runbook.cli._parser import CommandParser, command, option_table
from runbook.cli._runs import find_run
from runbook.cli.run.options import MACHINE, MEASURED, PART, PLACE, SCALE, TELLING
from runbook.console import Console, OutputFormat
from runbook.errors import ProgramExit, UsageError

if TYPE_CHECKING:
    from runbook.records import RunRecord

# A run continues with its original options; where it lies, how it is shown and how long this part
# may take may be said again.
_FREE_BESIDE_RESUME = (
    *("out", "resume", "failed", "phase", "until", "until_s"),
    *("partial_exit", "output_format", "json", "quiet", "no_color"),
)


def _add_arguments(parser: CommandParser) -> None:
    parser.set_defaults(plan="")
    group = parser.add_argument_group("what runs")
    option_table(
        """
        --phase LIST  all (default: every phase that is not optional), comma-separated names, or
            all,NAME; see `runbook phases`. With --resume these are added to the run
        """
    )(group)
    MACHINE(group)
    option_table(
        """
        --resume RUN    continue an interrupted run: its folder or id; with --phase a finished one
            too (default: begin a new one)
        --failed [RUN]  run again, in the same run (default: the newest), the phases of which a
            required check did not pass; what they left is kept, and the verdict names them
        """,
        failed={"const": ""},
    )(group)
    PART(group)
    option_table(
        """
        --keep-going  start every launch, even where a required row of preflight did not pass, or an
            equal launch of the phase has failed; without it these are not started
        """
    )(group)
    PLACE(parser.add_argument_group("where it runs"))
    measured = parser.add_argument_group("how it is measured")
    SCALE(measured)
    MEASURED(measured)
    TELLING(parser.add_argument_group("how it is told"))


def _problems(args: argparse.Namespace) -> list[str]:
    """Everything wrong with folders, phases, profile and settings, found together.

    Leaves what was found on the way in `args`: `options`, `setup`, `resume_folder`.
    """
    from runbook.config.precedence import shell_settings
    from runbook.config.setup import RunOptions
    from runbook.engine.plan.prepare import prepare
    from runbook.launch.launcher_api import launcher, launcher_names
    from runbook.machine.gpu import detect_profile
    from runbook.machine.surroundings import surroundings_problems

    found = []
    if args.out.exists() and not args.out.is_dir():
        found.append(f"--out {args.out}: is a file, not a folder")
    if args.partial_exit not in (ProgramExit.GO, ProgramExit.PARTIAL):
        found.append(f"--partial-exit {args.partial_exit}: expected 0 or 4")
    found.extend(_output_problems(args))
    if args.launcher in launcher_names() and not args.dry_run:  # else it is told with the options
        found.extend(launcher(args.launcher).lacks())
    found.extend(_continued(args))
    phases = "all" if args.phase is None else args.phase
    if args.goes_on and args.plan:
        phases = "all"  # what is added was found in its own plan
    if args.goes_on:
        args.plan = ""  # it has its plan, too
    # A run that goes on has its profile; what this machine would get does not matter then.
    auto = args.profile == "auto" and not args.goes_on
    profile, args.profile_reason = ("cpu" if args.goes_on else args.profile), "named"
    try:
        if auto:
            profile, args.profile_reason = detect_profile()
    except UsageError as error:
        found.append(str(error))
        profile = "cpu"  # so that everything else that is wrong is found in the same message
    names = {field.name for field in fields(RunOptions)}
    # What a command has no option for is as it is for whoever asks for nothing.
    said = {key: value for key, value in vars(args).items() if key in names and value is not None}
    said |= {"phases": phases, "profile": profile, "settings": tuple(args.settings)}
    said |= {"from_shell": shell_settings(os.environ)}
    args.options = RunOptions(**said, command=_command())
    try:
        args.setup = prepare(args.options)
    except UsageError as error:
        found.extend(error.problems)
    if not args.dry_run and args.launcher == DEFAULT_LAUNCHER:
        planned = args.setup.planned if "setup" in args and not args.goes_on else ()
        found.extend(surroundings_problems(max((one.timeout_s for one in planned), default=0.0)))
    return found


def _command() -> str:
    """What was typed."""
    return shlex.join(["runbook", *sys.argv[1:]])


def _output_problems(args: argparse.Namespace) -> list[str]:
    """--json is short for the format of that name; leaves what both mean in `args.output`."""
    chosen = args.output_format
    if args.json and chosen not in (None, OutputFormat.JSON):
        return [f"--json and --output-format {chosen}: choose one"]
    args.output = OutputFormat(chosen or ("json" if args.json else "text"))
    args.json = args.output is OutputFormat.JSON
    if args.dry_run and args.output is OutputFormat.GITHUB:
        return ["--output-format github is for a run: a dry run has nothing to annotate"]
    return []


def _continued(args: argparse.Namespace) -> list[str]:
    """What is wrong with --resume or --failed; leaves `goes_on`, `resume_folder`, `extension`."""
    from runbook.engine.extend import Extension

    again = args.failed is not None
    args.goes_on, args.resume_folder = again or args.resume is not None, None
    added = "" if again else args.phase or ""
    args.extension = Extension(phases=added, failed=again, command=_command())
    if not args.goes_on:
        return []
    flag = "--failed" if again else "--resume"
    found = _beside_resume(args, flag)
    if again:
        found += [
            f"{name} cannot be combined with --failed: it runs again what did not pass"
            for name, value in {"--resume": args.resume, "--phase": args.phase}.items()
            if value is not None
        ]
    try:
        args.resume_folder = find_run((args.failed or None) if again else args.resume, args.out)
    except UsageError as error:
        found.append(f"{flag}: {error}")
    return found


def _beside_resume(args: argparse.Namespace, flag: str) -> list[str]:
    """What is typed beside --resume would not be obeyed, so it is refused."""
    typed = [name for name in args.typed if name not in _FREE_BESIDE_RESUME]
    flags = ["--set" if name == "settings" else f"--{name.replace('_', '-')}" for name in typed]
    return [
        f"{name} cannot be combined with {flag}: the run continues with its original options"
        for name in flags
    ]


def _tell_settings(args: argparse.Namespace, console: Console) -> list[str]:
    """What a person gave for this run, in words; of one that goes on, how this shell differs."""
    from runbook.config.precedence import differing, shell_settings, told, unread
    from runbook.folder.journal import recorded_settings

    if not args.goes_on:
        setup = args.setup
        settings = told(setup.given, setup.sources, setup.profile.variables)
        return [*settings, *unread(setup.profile)]
    given, sources = recorded_settings(args.resume_folder)
    found = list(differing(given, sources, shell_settings(os.environ)))
    if found:
        text = f"this run keeps the variables that it began with: {'; '.join(found)}"
        console.error(f"warning: {text}")
    return found


@command(
    "run phases and give the verdict",
    json_help="every event as one JSON line on stdout (`runbook schema events`)",
    arguments=_add_arguments,
    problems=_problems,
)
def run(args: argparse.Namespace, console: Console) -> int:
    """Run the phases on this machine and say GO, NO-GO or INCOMPLETE. A run of some phases
    that all pass is a PARTIAL PASS, which is no GO.

    examples:
      runbook run                                     every phase, with the profile for this machine
      runbook run --dry-run                           show what would run and how long it may take
      runbook run --phase preflight,baseline --profile a100x2_pcie4
      runbook run --phase bucket_sweep --set NSA_DDP_COMPRESS=off --set train.lr=1e-4
      runbook run --phase bucket_sweep --aa           the same arm twice; the decision must be TIE
      runbook run --resume RUN --phase nvtx            add a phase to a finished run
      runbook run --failed                            run again what did not pass in the newest run
      runbook run --until-s 480; runbook run --resume artifacts/RUN --until-s 480     in parts

    The result goes to stdout, progress to stderr.
    exit codes: 0 GO, 1 NO-GO, 2 wrong usage, 3 INCOMPLETE, 4 PARTIAL PASS, 70 internal error,
    129 SIGHUP, 130 Ctrl-C, 143 SIGTERM
    """
    from runbook.checkout import how_to_call
    from runbook.cli.run.dry_run import print_plan, refusals, times
    from runbook.cli.run.observers import LogConsole, observer_for, print_summary, tell_github
    from runbook.config.precedence import dropped
    from runbook.engine.plan.needs import needs_of, without_board
    from runbook.engine.resuming import resume_run
    from runbook.engine.run import run_setup

    args.told = _tell_settings(args, console)
    if args.dry_run:
        return print_plan(args, console)
    plan = args.setup.profile.plan
    if plan and (refused := refusals(args, needs_of(args.setup))):
        raise UsageError(refused, hint="nothing was started")
    with observer_for(console, args.output) as observer:
        if args.resume_folder is not None:
            record = resume_run(
                args.resume_folder,
                observer=observer,
                until_s=args.until_s,
                extension=args.extension or None,
            )
        else:
            observer.note(f"profile {args.options.profile}: {args.profile_reason}")
            for text in args.told:
                observer.note(f"set {text}")
            if text := dropped(os.environ):
                observer.note(f"not passed on: {text}")
            if called := how_to_call():
                observer.note(called)
            if standing := args.setup.standing:
                observer.note(standing)
            for text in (*without_board(args.setup.profile), *times(args)) if plan else ():
                observer.note(text)
            record = run_setup(args.setup, observer=observer, until_s=args.until_s)
    folder, code = Path(observer.run_root), _exit_code(record, partial_exit=args.partial_exit)
    if args.output is OutputFormat.GITHUB:
        console = LogConsole(console)
        tell_github(console, record, folder, exit_code=code)
    if args.output is not OutputFormat.JSON:
        print_summary(console, record, folder)
    return code


def _exit_code(record: RunRecord, *, partial_exit: int) -> int:
    """The verdict's, or that of the signal that ended the run."""
    from runbook.engine.starting import NO_SIGNAL
    from runbook.records import Verdict

    if record.interrupted:
        name = str(record.options.get("signal"))
        if name in NO_SIGNAL:
            return ProgramExit.INCOMPLETE
        return 128 + signal.Signals.__members__.get(name, signal.SIGINT)
    if record.verdict is Verdict.PARTIAL:
        return partial_exit
    return record.verdict.exit_code
