"""`runbook nightly`: a whole run, and then this commit in turn with the pinned one."""

from __future__ import annotations

import argparse

from runbook.cli._parser import Command, CommandParser, path_type
from runbook.cli.run import RUN
from runbook.errors import UsageError

# The default of `runbook run`, by which it sees what was typed beside --resume.
AUTO = "auto"
_PHASES = "all,regression"
_PINNED = "configs/nightly.yaml"


def _add_arguments(parser: CommandParser) -> None:
    """Those of `runbook run`, with the defaults of a night."""
    RUN.add_arguments(parser)
    parser.change(
        "--phase",
        default=None,
        help=f"what runs, as in `runbook run` (default: {_PHASES})",
    )
    parser.change(
        "--profile",
        default="",
        help="the machine and its limits; a night names it, so that one without GPUs cannot look "
        f"like a good one (default: that of {_PINNED})",
    )
    parser.change(
        "--reference",
        default="",
        help=f"the commit to compare with (default: the one pinned in {_PINNED})",
    )
    parser.add_argument(
        "--pin",
        type=path_type,
        metavar="FILE",
        help=f"another file with reference and profile (default: {_PINNED})",
    )


def _problems(args: argparse.Namespace) -> list[str]:
    """Everything wrong with the pin and with what `runbook run` is then given."""
    from runbook.config.nightly import load_nightly

    if args.resume is not None or args.failed is not None:
        # The night that goes on has its own; `run` objects to what is typed beside it.
        args.profile = args.profile or AUTO
        return list(RUN.problems(args))
    args.phase = args.phase or _PHASES
    if not (args.profile and args.reference):
        try:
            pinned = load_nightly(args.pin)
        except UsageError as error:
            return list(error.problems)
        args.profile = args.profile or pinned.profile
        args.reference = args.reference or pinned.reference
    if args.profile != AUTO:
        return list(RUN.problems(args))
    return [f"--profile {AUTO}: a night names its machine; see `runbook profiles`"]


NIGHTLY = Command(
    name="nightly",
    help="run all phases, then hold this commit against a pinned one",
    description=f"""\
Run all phases, then launch the commit of this checkout in turn with a pinned reference, each from
a clean checkout of its own, and say whether it is slower. The reference is pinned in
{_PINNED}, which is changed by hand only. Everything else is as in `runbook run`.""",
    examples="""\
  runbook nightly                                     profile and reference as pinned
  runbook nightly --dry-run                           every command and how long it may take
  runbook nightly --resume artifacts/NIGHT            go on with a night that was cut off
  runbook nightly --phase preflight,regression --profile cpu --reference HEAD~1

A loss is FAIL only at the declared error after all rounds: see docs/trust.md.""",
    exits="the same as of `runbook run`; a regression is NO-GO (1), no evidence INCOMPLETE (3)",
    json_help=RUN.json_help,
    add_arguments=_add_arguments,
    problems=_problems,
    run=RUN.run,
)
