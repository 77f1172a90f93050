"""`runbook launch` and `runbook nightly`: what `runbook run` does, by a plan or by a pin."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from runbook import DEFAULT_PLAN
from runbook.cli._parser import CommandParser, command
from runbook.cli._runs import find_run
from runbook.cli.run import run
from runbook.console import Console
from runbook.errors import UsageError
from runbook.folder import EVENTS_FILE, read_events

# What `runbook run` has besides.
_NO_PLAN = ("--phase", "--keep-going", "--protocol", "--aa", "--seed", "--reference", "--head")


def _like_run(parser: CommandParser, without: Sequence[str] = ()) -> None:
    """The options of `runbook run` that the docstring does not tell."""
    theirs = CommandParser()
    run.arguments(theirs)
    parser.take(theirs, without)
    parser.set_defaults(plan=parser.get_default("plan") or "")


def _by_plan(parser: CommandParser) -> None:
    _like_run(parser, _NO_PLAN)
    parser.set_defaults(phase=None)


def _launch_problems(args: argparse.Namespace) -> list[str]:
    """Everything wrong with the plan, and with what `runbook run` is then given."""
    from nsa.contract import CONFIG_VARIABLE

    found: list[str] = []
    if args.misread and args.resume is None:
        args.without_go = True  # nothing starts; how far it was to go may be what was mistyped
    if args.config is not None and args.resume is None:
        args.settings = [*args.settings, f"{CONFIG_VARIABLE}={args.config}"]
    if args.resume is not None and args.until is not None:
        try:
            args.phase = _more_phases(args)
        except UsageError as error:
            found = list(error.problems)
    return [*found, *run.problems(args)]


def _more_phases(args: argparse.Namespace) -> str | None:
    """The phases up to --until of the run that goes on; None if it was asked for just these.

    Raises UsageError where its plan has no such phase, or where it was asked for more.
    """
    from runbook.config.setup import setup_of_record
    from runbook.engine.derive import derive_record
    from runbook.engine.earlier.standing import asked_for

    folder = find_run(args.resume, args.out)
    record = derive_record(read_events(Path(folder) / EVENTS_FILE)[0])
    setup = setup_of_record(record)
    wanted = asked_for(setup.profile, args.until)
    present = {phase.name for phase in setup.phases}
    if more := present - set(wanted):
        raise UsageError(
            f"--until {args.until}: {record.run_id} was asked for {', '.join(sorted(more))} too; "
            "leave out --until"
        )
    return ",".join(wanted) if set(wanted) - present else None


@command(
    "launch training by a plan: sanity, smoke, extended, production",
    json_help=run.json_help,
    options={"plan": DEFAULT_PLAN, "config": str},
    more=_by_plan,
    problems=_launch_problems,
    instead={"--phase": "--until"},
)
def launch(args: argparse.Namespace, console: Console) -> int:
    """Run the phases of a plan, one step to the whole production run, and stop at the first one
    that does not pass its gate. All is recorded, watched and reported as in `runbook run`.
    Production starts only behind a GO of `runbook run` for the same configuration and machine, in
    the same folder.

    what runs:
      --plan NAME|FILE  the phases with their steps, data and gates (default: production);
          shipped ones are in configs/plans/, one of your own is a path ending in .yaml
      --config FILE  the trainer's config, as --set CONFIG=FILE (default: the profile's)
      --until PHASE  the last phase of the plan that runs (default: all). With --resume it goes on
          as far as this one
      --resume RUN  go on with a launch that was cut off, or ended with a crash or a hang: its
          folder or id; what had finished is not repeated, and a leg begins again at the
          checkpoint before it (default: begin a new one)
      --without-go  start a phase that needs a GO without one; the verdict's first line says so
          (default: refuse it, before anything starts)

    examples:
      runbook launch --dry-run                            the commands of every phase
      runbook launch --until smoke                        one step, then 300 on the dataset
      runbook launch                                      all of it, once a validation said GO here
      runbook launch --resume artifacts/RUN               after a crash: from the last checkpoint
      runbook launch --plan ./mine.yaml --config ./mine_config.yaml
      runbook launch --profile cpu --steps-scale 0.02 --without-go     a rehearsal of a minute
    exit codes: 0 GO, 1 NO-GO, 2 wrong usage, 3 INCOMPLETE, 4 PARTIAL PASS (--until),
    70 internal error, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM
    """
    return run.run(args, console)


_NIGHTLY_PHASES = "all,regression"


def _nightly_problems(args: argparse.Namespace) -> list[str]:
    """Everything wrong with the pin and with what `runbook run` is then given."""
    from runbook.config.setup import load_nightly

    if args.resume is not None:
        # The night that goes on has its own; `run` objects to what is typed beside it.
        return list(run.problems(args))
    args.phase = args.phase or _NIGHTLY_PHASES
    if not (args.profile and args.reference):
        try:
            pinned = load_nightly()
        except UsageError as error:
            return list(error.problems)
        args.profile = args.profile or pinned.profile
        args.reference = args.reference or pinned.reference
    if args.profile != "auto":
        return list(run.problems(args))
    return ["--profile auto: a night names its machine; see `runbook profiles`"]


@command(
    "run all phases, then hold this commit against a pinned one",
    json_help=run.json_help,
    options={"profile": "", "reference": ""},
    more=_like_run,
    problems=_nightly_problems,
)
def nightly(args: argparse.Namespace, console: Console) -> int:
    """Run all phases, then launch the commit of this checkout in turn with a pinned reference, each
    from a clean checkout of its own, and say whether it is slower. The reference is pinned in
    configs/nightly.yaml, which is changed by hand only. Everything else is as in `runbook run`.

    what runs:
      --phase LIST  what runs, as in `runbook run` (default: all,regression)
      --profile NAME|FILE  the machine and its limits; a night names it, so that one without GPUs
          cannot look like a good one (default: that of configs/nightly.yaml)

    how it is measured:
      --reference COMMIT  the commit to compare with (default: the one pinned in
          configs/nightly.yaml)

    examples:
      runbook nightly                                     profile and reference as pinned
      runbook nightly --dry-run                           the commands and how long they may take
      runbook nightly --resume artifacts/NIGHT            go on with a night that was cut off
      runbook nightly --phase preflight,regression --profile cpu --reference HEAD~1

    A loss is FAIL only at the declared error after all rounds: see docs/trust.md.
    exit codes: the same as of `runbook run`; a regression is NO-GO (1), no evidence INCOMPLETE (3)
    """
    return run.run(args, console)
