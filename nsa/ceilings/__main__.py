"""Entry point: `python -m nsa.ceilings [--device auto|cpu|cuda]`, also under torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import MutableMapping, Sequence

from nsa import torch_env
from nsa.contract import ExitCode, NSAError, did_you_mean
from nsa.launch.output import shout
from nsa.launch.plan import harness_of, read_place
from nsa.launch.process import Termination, arm_death_signal, dump_stacks_on_usr1
from nsa.settings import refusal
from nsa.torch_env import for_good
from nsa.train.__main__ import translate_environment

_DEVICES = ("auto", "cpu", "cuda")


def main(argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Check the command line, then measure. Returns the exit code."""
    arm_death_signal(environ)
    dump_stacks_on_usr1()
    termination = Termination()
    termination.install()
    parser = argparse.ArgumentParser(
        prog="python -m nsa.ceilings",
        description="Measure matrix product, copies and all-reduce of this machine, in seconds.",
        epilog="Exit codes: " + "; ".join(f"{code:d} {code.meaning}" for code in ExitCode) + ".",
        allow_abbrev=False,
    )
    parser.add_argument("--device", default="auto", metavar="{auto,cpu,cuda}", help="(auto)")
    known, unknown = parser.parse_known_args(list(argv))
    place, problems = read_place(environ)
    problems += [f"{word}: no such flag; there is --device" for word in unknown]
    if known.device not in _DEVICES:
        near = did_you_mean(known.device, _DEVICES)
        problems.append(f"--device {known.device}: allowed is {', '.join(_DEVICES)}{near}")
    run_dir, token = harness_of(environ, problems)
    passed, wrong = torch_env.plan(environ, uses_nccl=known.device != "cpu")
    try:
        if problems or wrong:
            raise refusal([*problems, *wrong])
    except NSAError as error:
        shout(str(error) if place.rank == 0 else f"[rank {place.rank}] {error}")
        return int(ExitCode.CONFIG)
    translate_environment(passed, environ)
    with for_good():
        from nsa.ceilings.session import run

    given = run_dir.resolve() if run_dir is not None and token is not None else None
    return run(known.device, place, termination, run_dir=given, token=token)


if __name__ == "__main__":
    code = main(sys.argv[1:], os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written and on the disk; tearing torch down would only take time.
    os._exit(code)
