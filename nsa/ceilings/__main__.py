"""Entry point: `python -m nsa.ceilings [--device auto|cpu|cuda]`, also under torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import MutableMapping, Sequence

from nsa import torch_env
from nsa.contract import ExitCode
from nsa.launch.plan import harness_of, read_place
from nsa.launch.process import leave, refuse, take_signals
from nsa.settings import refusal
from nsa.torch_env import for_good


def main(argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Check the command line, then measure. Returns the exit code."""
    termination = take_signals(environ)
    parser = argparse.ArgumentParser(
        prog="python -m nsa.ceilings",
        description="Measure matrix product, copies and all-reduce of this machine, in seconds.",
        epilog="Exit codes: " + "; ".join(f"{code:d} {code.meaning}" for code in ExitCode) + ".",
        allow_abbrev=False,
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(auto)")
    known = parser.parse_args(list(argv))
    place, problems = read_place(environ)
    run_dir, token = harness_of(environ, problems)
    passed, wrong = torch_env.plan(environ, uses_nccl=known.device != "cpu")
    if problems or wrong:
        return refuse(refusal([*problems, *wrong]), environ)
    torch_env.translate(passed, environ)
    with for_good():
        from nsa.ceilings.measure import run

    return run(known.device, place, termination, run_dir=run_dir, token=token or "")


if __name__ == "__main__":
    leave(main(sys.argv[1:], os.environ))
