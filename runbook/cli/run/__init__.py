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

from runbook import DEFAULT_LAUNCHER, DEFAULT_PROTOCOL, DEFAULT_QUEUE_S, FILE_AFTER
from runbook.cli._parser import command, number_type, whole_type
from runbook.cli._runs import find_run
from runbook.console import Console, OutputFormat
from runbook.errors import ProgramExit, UsageError

if TYPE_CHECKING:
    from runbook.launch.observer import StopRequest
    from runbook.records import RunRecord

# A run continues with its original options; where it lies and how it is shown may be said again.
_FREE_BESIDE_RESUME = (
    *("out", "resume", "phase", "until"),
    *("partial_exit", "output_format", "json", "quiet", "no_color"),
)


def _problems(args: argparse.Namespace) -> list[str]:
    """Everything wrong with folders, phases, profile and settings, found together.

    Leaves what was found on the way in `args`: `options`, `setup`, `resume_folder`.
    """
    from runbook.config import registry
    from runbook.config.precedence import shell_settings
    from runbook.config.setup import RunOptions
    from runbook.engine.plan.prepare import prepare
    from runbook.launch.launcher_api import GROUP, launcher
    from runbook.machine.gpu import detect_profile
    from runbook.machine.surroundings import surroundings_problems

    found = []
    if args.out.exists() and not args.out.is_dir():
        found.append(f"--out {args.out}: is a file, not a folder")
    if args.partial_exit not in (ProgramExit.GO, ProgramExit.PARTIAL):
        found.append(f"--partial-exit {args.partial_exit}: expected 0 or 4")
    found.extend(_output_problems(args))
    # A name that there is not is told with the options.
    if args.launcher.partition(FILE_AFTER)[0] in registry.names(GROUP) and not args.dry_run:
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
    """What is wrong with --resume; leaves `goes_on`, `resume_folder`, `added`."""
    args.goes_on, args.resume_folder = args.resume is not None, None
    args.added = args.phase or ""
    if not args.goes_on:
        return []
    found = _beside_resume(args)
    try:
        args.resume_folder = find_run(args.resume, args.out)
    except UsageError as error:
        found.append(f"--resume: {error}")
    return found


def _beside_resume(args: argparse.Namespace) -> list[str]:
    """What is typed beside --resume would not be obeyed, so it is refused."""
    typed = [name for name in args.typed if name not in _FREE_BESIDE_RESUME]
    flags = ["--set" if name == "settings" else f"--{name.replace('_', '-')}" for name in typed]
    return [
        f"{name} cannot be combined with --resume: the run continues with its original options"
        for name in flags
    ]


def _tell_settings(args: argparse.Namespace, console: Console) -> list[str]:
    """What a person gave for this run, in words; one that goes on takes nothing new."""
    from runbook.config.precedence import told, unread

    if args.goes_on:
        console.error("this run keeps the variables that it began with, whatever this shell has")
        return []
    setup = args.setup
    settings = told(setup.settings.texts(), setup.sources, setup.profile.variables)
    return [*settings, *unread(setup.profile)]


@command(
    "run phases and give the verdict",
    json_help="every event as one JSON line on stdout (docs/events.schema.json)",
    options={
        "profile": "auto",
        "preset": "",
        "launcher": DEFAULT_LAUNCHER,
        "nodes": 1,
        "partition": "",
        "account": "",
        "queue_s": DEFAULT_QUEUE_S,
        "steps_scale": {"type": number_type(above=0), "default": 1.0},
        "gpu_hour_price": number_type(at_least=0),
        "protocol": DEFAULT_PROTOCOL,
        "seed": {"type": whole_type(at_least=0), "default": 0},
        "reference": "",
        "head": "",
        "output_format": {"choices": [one.value for one in OutputFormat]},
        "partial_exit": {"type": whole_type(at_least=0), "default": int(ProgramExit.PARTIAL)},
    },
    more=lambda parser: parser.set_defaults(plan=""),
    problems=_problems,
)
def run(args: argparse.Namespace, console: Console) -> int:
    """Run the phases on this machine and say GO, NO-GO or INCOMPLETE. A run of some phases
    that all pass is a PARTIAL PASS, which is no GO.

    what runs:
      --phase LIST  all (default: every phase that is not optional), comma-separated names, or
          all,NAME; see `runbook phases`. With --resume these are added to the run
      --profile auto|NAME|FILE  the machine and its limits; auto (default) asks nvidia-smi, and
          takes cpu only where no NVIDIA device or driver is seen; see `runbook profiles`
      --set KEY=VALUE  an NSA_* or NCCL_* variable, CONFIG, or a config key such as train.seq_len;
          repeatable; goes over this shell's variables, which go over the preset's and the profile's
          (default: none)
      --preset NAME  variables that belong together, over the profile's and under those of this
          shell: `runbook toggles --preset NAME` shows them, and the commands that take it
          (default: none)
      --out DIR  each run gets a new folder here (default: artifacts)
      --resume RUN    go on with a run, its folder or id: where it was cut off; of a finished one,
          run again the phases of which a required check did not pass, keep what they left, and name
          them in the verdict; with --phase add phases (default: begin a new one)
      --dry-run  print the commands with time estimates; start and judge nothing
      --keep-going  start every launch, even where a required row of preflight did not pass, or an
          equal launch of the phase has failed; without it these are not started

    where it runs:
      --launcher NAME  where launches run: local, this machine (default), slurm, each as a job of
          Slurm, or kubernetes:FILE, each as a Job whose pods are like the one in FILE; on nodes
          that share this folder and this Python; a package may add others
      --nodes N         on a cluster: the nodes over which the profile's ranks are spread (default:
          1)
      --partition NAME  with slurm: the partition of the jobs (default: the cluster's)
      --account NAME    with slurm: the account that pays for the jobs (default: the cluster's)
      --queue-s S       on a cluster: end a job that has waited S seconds for its nodes
          (default: 3600)

    how it is measured:
      --steps-scale F  factor on every step count; less than 1 is only for trying things out
          (default: 1)
      --gpu-hour-price F  price of one GPU for one hour, in any currency, to show what a run costs
          (default: costs are not shown)
      --protocol blocks|launches|single  how arms are compared: in turns inside one launch
          (blocks), in one launch for each arm and round (launches), or one launch of each arm, as
          the documents wrote it (single) (default: blocks)
      --aa  compare an arm with itself; the decision must be TIE
      --seed N  random seed for the order of arms (default: 0)
      --reference COMMIT  what phase regression compares with (no default); a clean checkout of it
          is made for the run
      --head COMMIT  what phase regression holds against it (default: the commit of this checkout)

    how it is told:
      --output-format text|json|github  text (default) for people; json: every event as one JSON
          line, the same as --json; github: annotations, step summary and outputs of GitHub
          Actions
      --partial-exit 0|4  exit code of PARTIAL PASS: 4 (default), or 0 for a step of a job that
          runs a part on purpose

    examples:
      runbook run                                     every phase, with the profile for this machine
      runbook run --dry-run                           show what would run and how long it may take
      runbook run --phase preflight,baseline --profile a100x2_pcie4
      runbook run --phase bucket_sweep --set NSA_DDP_COMPRESS=off --set train.lr=1e-4
      runbook run --phase bucket_sweep --aa           the same arm twice; the decision must be TIE
      runbook run --resume RUN --phase nvtx            add a phase to a finished run
      runbook run --resume RUN                         go on, or run again what did not pass
      timeout --foreground 480 runbook run            end it in time; --resume RUN goes on

    The result goes to stdout, progress to stderr. How often a decision errs: docs/trust.md.
    exit codes: 0 GO, 1 NO-GO, 2 wrong usage, 3 INCOMPLETE, 4 PARTIAL PASS, 70 internal error,
    129 SIGHUP, 130 Ctrl-C, 143 SIGTERM
    """
    from runbook.cli.run.dry_run import print_plan, refusals
    from runbook.engine.plan.prepare import needs_of
    from runbook.launch.observer import StopRequest, stop_on_signals

    args.told = _tell_settings(args, console)
    if args.dry_run:
        return print_plan(args, console)
    plan = args.setup.profile.plan
    if plan and (refused := refusals(args, needs_of(args.setup))):
        raise UsageError(refused, hint="nothing was started")
    # A signal ends the run, from before its folder is there until its verdict is told.
    with stop_on_signals(StopRequest()) as stop:
        return _run(args, console, stop)


def _run(args: argparse.Namespace, console: Console, stop: StopRequest) -> int:
    from runbook.checkout import how_to_call
    from runbook.cli.run.dry_run import times
    from runbook.cli.run.observers import LogConsole, observer_for, print_summary, tell_github
    from runbook.config.precedence import dropped
    from runbook.engine.plan.prepare import without_board
    from runbook.engine.resuming import resume_run
    from runbook.engine.run import run_setup

    plan = args.setup.profile.plan
    with observer_for(console, args.output) as observer:
        if args.resume_folder is not None:
            record = resume_run(
                args.resume_folder,
                observer=observer,
                added=args.added,
                command=_command(),
                stop=stop,
            )
        else:
            observer.note(f"profile {args.options.profile}: {args.profile_reason}")
            for text in args.told:
                observer.note(f"set {text}")
            if text := dropped(os.environ, args.setup.profile.own_trainer):
                observer.note(f"not passed on: {text}")
            if called := how_to_call():
                observer.note(called)
            if standing := args.setup.standing:
                observer.note(standing)
            for text in (*without_board(args.setup.profile), *times(args)) if plan else ():
                observer.note(text)
            record = run_setup(args.setup, observer=observer, stop=stop)
    folder, code = Path(observer.run_root), _exit_code(record, partial_exit=args.partial_exit)
    if args.output is OutputFormat.GITHUB:
        console = LogConsole(console)
        tell_github(console, record, folder, exit_code=code)
    if args.output is not OutputFormat.JSON:
        print_summary(console, record, folder)
    return code


def _exit_code(record: RunRecord, *, partial_exit: int) -> int:
    """The verdict's, or that of the signal that ended the run."""
    from runbook.engine.starting import PREEMPTION
    from runbook.records import Verdict

    if record.interrupted:
        name = str(record.options.get("signal"))
        if name == PREEMPTION:
            return ProgramExit.INCOMPLETE
        return 128 + signal.Signals.__members__.get(name, signal.SIGINT)
    if record.verdict is Verdict.PARTIAL:
        return partial_exit
    return record.verdict.exit_code
