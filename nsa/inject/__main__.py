"""Entry point: `-m nsa.inject KIND RANK STEP -- ARGUMENTS`, also under torchrun."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence

from nsa.contract import did_you_mean
from nsa.inject import EVERY_RANK, Injector
from nsa.inject.kinds import KINDS
from nsa.launch.process import leave
from nsa.torch_env import for_good


def main(argv: Sequence[str]) -> int:
    """Install the fault, then run the trainer in this process. Returns its exit code."""
    cut = list(argv).index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:cut])
    if cut == len(argv):
        _parser().error("the trainer's own arguments follow after --")
    with for_good():
        KINDS[options.kind](Injector(options.kind, options.rank, options.step))
        from nsa.train.__main__ import main as train

    return train(argv[cut + 1 :], os.environ)


def _parser() -> argparse.ArgumentParser:
    kinds = textwrap.fill(", ".join(KINDS), 78, initial_indent="  ", subsequent_indent="  ")
    parser = argparse.ArgumentParser(
        prog="python -m nsa.inject",
        usage="%(prog)s KIND RANK STEP -- TRAINER_ARGUMENTS",
        description="Train as nsa.train does, with one fault injected into one rank at one step.",
        epilog=f"kinds:\n{kinds}\n\nexample, two ranks, the second killed at step 5:\n"
        "  torchrun --nproc_per_node=2 -m nsa.inject kill 1 5 -- "
        "--config configs/cpu_smoke.yaml\n\n"
        "`runbook drill` injects them all and says whether they are noticed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", metavar="KIND", type=_kind, help="what goes wrong; see below")
    parser.add_argument(
        "rank", metavar="RANK", type=_rank, help="in which rank, from 0; -1: in all"
    )
    parser.add_argument("step", metavar="STEP", type=_count, help="at which step, from 1")
    return parser


def _kind(text: str) -> str:
    if text not in KINDS:
        raise argparse.ArgumentTypeError(f"no fault {text!r}{did_you_mean(text, KINDS)}")
    return text


def _rank(text: str) -> int:
    return EVERY_RANK if text == str(EVERY_RANK) else _count(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
