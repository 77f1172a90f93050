"""What `runbook run` and its kin ask for, group by group."""

from __future__ import annotations

import argparse

from runbook.cli._parser import CommandParser, add_out, add_settings, number_type, whole_type
from runbook.console import OutputFormat
from runbook.defaults import (
    DEFAULT_LAUNCHER,
    DEFAULT_OUT,
    DEFAULT_PROTOCOL,
    DEFAULT_QUEUE_S,
    PROTOCOLS,
)
from runbook.errors import ProgramExit


def add_machine(group: argparse._ArgumentGroup) -> None:
    """On what, with which settings, and where to."""
    group.add_argument(
        "--profile",
        default="auto",
        metavar="auto|NAME|FILE",
        help="the machine and its limits; auto (default) asks nvidia-smi, and takes cpu only where "
        "no NVIDIA device or driver is seen; see `runbook profiles`",
    )
    add_settings(
        group,
        "an NSA_* or NCCL_* variable, CONFIG, or a config key such as train.seq_len; repeatable; "
        "goes over this shell's variables, which go over the preset's and the profile's (default: "
        "none)",
    )
    group.add_argument(
        "--preset",
        default="",
        metavar="NAME",
        help="variables that belong together, over the profile's and under those of this shell: "
        "`runbook toggles --preset NAME` shows them, and the commands that take it (default: none)",
    )
    add_out(group, f"each run gets a new folder here (default: {DEFAULT_OUT})")


def add_place(group: argparse._ArgumentGroup) -> None:
    """Where the launches run."""
    group.add_argument(
        "--launcher",
        default=DEFAULT_LAUNCHER,
        metavar="local|slurm",
        help="where launches run: on this machine (default), or each as a job of Slurm, on nodes "
        "that share this folder and this Python",
    )
    group.add_argument(
        "--nodes",
        type=whole_type(at_least=1),
        default=1,
        metavar="N",
        help="with slurm: the nodes over which the profile's ranks are spread (default: 1)",
    )
    for name, what in (("partition", "of the jobs"), ("account", "that pays for the jobs")):
        group.add_argument(
            f"--{name}",
            default="",
            metavar="NAME",
            help=f"with slurm: the {name} {what} (default: the cluster's)",
        )
    group.add_argument(
        "--queue-s",
        type=number_type(above=0),
        default=DEFAULT_QUEUE_S,
        metavar="S",
        help="with slurm: end a job that has waited S seconds for its nodes "
        f"(default: {DEFAULT_QUEUE_S:g})",
    )


def add_until_s(group: argparse._ArgumentGroup) -> None:
    """--until-s, for a run in parts."""
    group.add_argument(
        "--until-s",
        type=number_type(above=0),
        metavar="S",
        help="end this part of the run within S seconds and exit with 3; --resume goes on with the "
        "next part. A launch that would be cut off is left to it (default: no limit)",
    )


def add_dry_run(group: argparse._ArgumentGroup) -> None:
    """--dry-run."""
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print the commands with time estimates; start and judge nothing",
    )


def add_telling(parser: CommandParser) -> None:
    """How the run and its end are told."""
    group = parser.add_argument_group("how it is told")
    group.add_argument(
        "--output-format",
        choices=[one.value for one in OutputFormat],
        metavar="|".join(OutputFormat),
        help="text (default) for people; json: every event as one JSON line, the same as --json; "
        "github: groups, annotations, step summary and outputs of GitHub Actions",
    )
    group.add_argument(
        "--partial-exit",
        type=whole_type(at_least=0),
        default=int(ProgramExit.PARTIAL),
        metavar="0|4",
        help="exit code of PARTIAL PASS: 4 (default), or 0 for a step of a job that runs a part "
        "on purpose",
    )


def add_scale(group: argparse._ArgumentGroup) -> None:
    """--steps-scale and the price of a GPU."""
    group.add_argument(
        "--steps-scale",
        type=number_type(above=0),
        default=1.0,
        metavar="F",
        help="factor on every step count; less than 1 is only for trying things out (default: 1)",
    )
    group.add_argument(
        "--gpu-hour-price",
        type=number_type(at_least=0),
        metavar="F",
        help="price of one GPU for one hour, in any currency, to show what a run costs (default: "
        "costs are not shown)",
    )


def add_measuring(group: argparse._ArgumentGroup) -> None:
    add_scale(group)
    group.add_argument(
        "--protocol",
        default=DEFAULT_PROTOCOL,
        metavar="|".join(PROTOCOLS),
        help="how arms are compared: in turns inside one launch (blocks), in one "
        "launch for each arm and round (launches), or one launch of each arm, as the documents "
        "wrote it (single) (default: blocks)",
    )
    group.add_argument(
        "--aa", action="store_true", help="compare an arm with itself; the decision must be TIE"
    )
    group.add_argument(
        "--seed",
        type=whole_type(at_least=0),
        default=0,
        metavar="N",
        help="random seed for the order of arms (default: 0)",
    )
    group.add_argument(
        "--reference",
        default="",
        metavar="COMMIT",
        help="what phase regression compares with (no default); a clean checkout of it is made for "
        "the run",
    )
    group.add_argument(
        "--head",
        default="",
        metavar="COMMIT",
        help="what phase regression holds against it (default: the commit of this checkout)",
    )
