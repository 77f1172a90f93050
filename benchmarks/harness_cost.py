"""What the harness costs: a run of phases against its launches, run bare, in processor time.

    python -m benchmarks.harness_cost [--rounds 3] [--phase LIST] [--steps-scale X] [--profile cpu]

A is `runbook run --phase LIST`; B are the launches that A started, one after the other: the same
words and variables, as A's launch.json files have them, each in a folder of its own. A and B take
turns. Processor time is that of all processes which were waited for (RUSAGE_CHILDREN), user and
system. Prints both, their ratio in each round, and the median.

Both sides train the same steps, which dominate: a difference is what the harness takes to plan,
watch, sample, read, judge and render. A busy machine makes both dearer, not always alike: trust the
median of the ratios, and the range.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WANTED = 1.05


def cpu_s() -> float:
    """Processor time of all children that were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def timed(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> float:
    """Run a command to its end; its processor time. Raises if it could not start or was refused."""
    before = cpu_s()
    with (folder / "output.txt").open("a") as output:
        done = subprocess.run(
            words, cwd=folder, env=environment, stdout=output, stderr=output, check=False
        )
    if done.returncode not in (0, 1, 3, 4):
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}, see {output.name}")
    return cpu_s() - before


def plain_environment() -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if not n.startswith(("NSA_", "NCCL_", "CONFIG"))}


def with_harness(folder: Path, asked: Sequence[str]) -> tuple[float, list[Mapping[str, Any]]]:
    """One run; its processor time, and the launches that it started in their order."""
    words = [sys.executable, "-P", "-m", "runbook", "run", *asked, "--out", str(folder / "runs")]
    spent = timed(words, folder, plain_environment())
    found = sorted((folder / "runs").glob("*/*/*/launch.json"), key=lambda p: p.stat().st_mtime)
    return spent, [json.loads(path.read_text()) for path in found]


def bare(folder: Path, launches: Sequence[Mapping[str, Any]]) -> float:
    """The same launches without the harness; their processor time."""
    spent = 0.0
    for number, launch in enumerate(launches):
        own = folder / f"bare{number}"
        own.mkdir()
        spent += timed(launch["argv"], own, {**plain_environment(), **launch["env"]})
    return spent


def main() -> int:
    """Take turns, print, compare with what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--phase", default="baseline,single_gpu")
    parser.add_argument("--profile", default="cpu")
    parser.add_argument("--steps-scale", default="1")
    args = parser.parse_args()
    asked = ("--phase", args.phase, "--profile", args.profile, "--steps-scale", args.steps_scale)
    ratios = []
    for number in range(1, args.rounds + 1):
        with tempfile.TemporaryDirectory() as name:
            spent, launches = with_harness(Path(name), asked)
            alone = bare(Path(name), launches)
        ratios.append(spent / alone)
        print(
            f"round {number}: {len(launches)} launches, run {spent:.1f} s, bare {alone:.1f} s, "
            f"harness {spent - alone:+.1f} s, ratio {ratios[-1]:.3f}",
            flush=True,
        )
    middle = statistics.median(ratios)
    print(f"ratio {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f}), wanted {WANTED} at most")
    return 0 if middle <= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
