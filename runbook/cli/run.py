"""`runbook run`: the phases, one after the other, and the verdict."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runbook.cli._common import DEFAULT_OUT, find_run
from runbook.cli._parser import add_output_flags
from runbook.console import console_for
from runbook.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from runbook.engine import RunOptions


REPORT_FORMATS = ("md", "html", "junit", "json", "terminal")
PROTOCOLS = ("blocks", "launches", "seed")
_SIGNAL_CODES = {"SIGINT": 130, "SIGTERM": 143}

_EPILOG = """\
examples:
  runbook run                                         every phase, profile for this machine
  runbook run --dry-run                               what would run, with times; starts nothing
  runbook run --phase preflight,baseline --profile a100x2_pcie4
  runbook run --phase bucket_sweep --set NSA_DDP_COMPRESS=off --set train.seq_len=1024
  runbook run --phase bucket_sweep --aa               the same arm twice: must come out as a tie

the result goes to stdout, progress to stderr.
exit codes: 0 GO, 1 NO-GO, 2 wrong usage, 3 INCOMPLETE, 130 Ctrl-C, 143 SIGTERM"""


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="run phases and give the verdict",
        description="Run the phases on this machine and say GO, NO-GO or INCOMPLETE.",
        epilog=_EPILOG,
    )
    _add_choices(parser)
    _add_measuring(parser)
    add_output_flags(parser, json_help="every event as one JSON line on stdout")


def _add_choices(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what runs")
    group.add_argument(
        "--phase",
        default="all",
        metavar="LIST",
        help="all (the nine), names with commas between, or all,fineweb; see `runbook phases`",
    )
    group.add_argument(
        "--profile",
        default="auto",
        metavar="auto|NAME|FILE",
        help="the machine and its limits; auto asks nvidia-smi; see `runbook profiles`",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="an NSA_* or NCCL_* variable, or a config key such as train.seq_len; repeatable",
    )
    group.add_argument(
        "--out",
        default=DEFAULT_OUT,
        metavar="DIR",
        help=f"each run gets a new folder in it (default {DEFAULT_OUT})",
    )
    group.add_argument(
        "--resume", metavar="RUN", help="go on with a run that was cut off: its folder or id"
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print the command lines with time estimates; start and judge nothing",
    )


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how it is measured")
    group.add_argument(
        "--protocol",
        default="blocks",
        metavar="|".join(PROTOCOLS),
        help="arms take turns inside one launch (blocks, the default), one launch for each arm "
        "and round (launches), or one launch each as the seed documents do (seed)",
    )
    group.add_argument(
        "--steps-scale",
        default="1",
        metavar="F",
        help="multiply every step count; below 1 is for trying things out",
    )
    group.add_argument(
        "--aa", action="store_true", help="compare an arm with itself: the answer must be a tie"
    )
    group.add_argument("--seed", default="0", metavar="N", help="seed of the order of arms")
    group.add_argument(
        "--gpu-hour-price", metavar="F", help="price of one GPU for one hour, to show a run's cost"
    )


def problems(args: argparse.Namespace) -> list[str]:
    """Everything wrong with phases, profile, settings, numbers and folders, found together."""
    found: list[str] = []
    args.steps_scale_value = _number(found, "--steps-scale", args.steps_scale, above=0.0)
    args.gpu_hour_price_value = (
        None
        if args.gpu_hour_price is None
        else _number(found, "--gpu-hour-price", args.gpu_hour_price, at_least=0.0)
    )
    args.seed_value = _whole(found, "--seed", args.seed)
    if args.protocol not in PROTOCOLS:
        found.append(
            f"--protocol {args.protocol!r}: no such protocol"
            f"{did_you_mean(args.protocol, PROTOCOLS)}; there are: {', '.join(PROTOCOLS)}"
        )
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        found.append(f"--out {args.out}: is a file, not a folder")
    _select_phases(found, args)
    _select_profile(found, args)
    _select_settings(found, args)
    args.resume_folder = None
    if args.resume is not None:
        found.extend(_beside_resume(args))
        try:
            args.resume_folder = find_run(args.resume, out)
        except UsageError as error:
            found.append(f"--resume: {error}")
    return found


def _beside_resume(args: argparse.Namespace) -> list[str]:
    """A run goes on as it was begun: what else was typed would not be obeyed, so it is refused."""
    defaults: dict[str, object] = {
        "phase": "all",
        "profile": "auto",
        "settings": [],
        "protocol": "blocks",
    }
    defaults |= {"steps_scale": "1", "aa": False, "seed": "0", "gpu_hour_price": None}
    defaults["dry_run"] = False
    return [
        f"--{'set' if name == 'settings' else name.replace('_', '-')} does not go with --resume: "
        "the run goes on with the options it was begun with"
        for name, default in defaults.items()
        if getattr(args, name) != default
    ]


def _select_phases(found: list[str], args: argparse.Namespace) -> None:
    from runbook.registry import select

    try:
        select(args.phase)
    except UsageError as error:
        found.extend(error.problems)


def _select_profile(found: list[str], args: argparse.Namespace) -> None:
    from runbook.config import detect_profile, load_profile

    args.profile_reason = "named"
    name = args.profile
    if name == "auto":
        name, args.profile_reason = detect_profile()
    args.profile_name = name
    try:
        args.chosen_profile = load_profile(name)
    except UsageError as error:
        found.extend(error.problems)


def _select_settings(found: list[str], args: argparse.Namespace) -> None:
    from runbook.config import parse_settings

    try:
        parse_settings(args.settings)
    except UsageError as error:
        found.extend(error.problems)


def _number(
    found: list[str],
    flag: str,
    text: str,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= above or value < at_least:
        bound = f" above {above:g}" if above > -math.inf else f" of {at_least:g} or more"
        found.append(f"{flag} {text!r}: expected a number{bound}")
    return value


def _whole(found: list[str], flag: str, text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    found.append(f"{flag} {text!r}: expected a whole number of 0 or more")
    return 0


def run(args: argparse.Namespace) -> int:
    """Run the plan, or print it; return the verdict's exit code."""
    from runbook.engine import RunOptions

    options = RunOptions(
        phases=args.phase,
        profile=args.profile_name,
        out=Path(args.out),
        settings=tuple(args.settings),
        steps_scale=args.steps_scale_value,
        protocol=args.protocol,
        aa=args.aa,
        seed=args.seed_value,
        gpu_hour_price=args.gpu_hour_price_value,
        command=shlex.join(["runbook", *sys.argv[1:]]),
        formats=REPORT_FORMATS,
    )
    if args.dry_run:
        from runbook.cli._dry_run import print_plan

        return print_plan(options, args)
    return _run(options, args)


def _run(options: RunOptions, args: argparse.Namespace) -> int:
    from runbook.cli._common import print_summary
    from runbook.cli._observers import observer_for
    from runbook.engine import resume_run, run_plan

    console = console_for(args)
    with observer_for(args, console) as observer:
        if args.resume_folder is not None:
            record = resume_run(args.resume_folder, observer=observer)
        else:
            observer.note(f"profile {options.profile}: {args.profile_reason}")
            record = run_plan(options, observer=observer)
    if not args.json:
        print_summary(console, record, Path(observer.run_root))
    if record.interrupted:
        return _SIGNAL_CODES.get(str(record.options.get("signal")), _SIGNAL_CODES["SIGINT"])
    return record.verdict.exit_code
