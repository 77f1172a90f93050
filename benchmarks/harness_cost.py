"""What the harness costs: a run of phases against its launches, run bare, in processor time.

    python -m benchmarks.harness_cost [--rounds 3] [--phase LIST] [--steps-scale X] [--profile cpu]
                                      [--without-bytecode]

A is `runbook run --phase LIST`; B are the launches that A started, one after the other: the same
words and variables, as A's launch.json files have them, each in a folder of its own. A and B take
turns. Processor time is that of all processes which were waited for (RUSAGE_CHILDREN), user and
system. Prints both, their ratio in each round, and the median.

Python keeps the bytecode of what it imported, as anybody's second run finds it; the first start of
all writes it and is not counted. `--without-bytecode` measures where none may be kept: each process
compiles the source again, on both sides.

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
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
# One short launch, by which all that a run imports is compiled.
_FIRST = ("--phase", "baseline", "--protocol", "single", "--steps-scale", "0.05")


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


def plain_environment(*, bytecode: bool) -> dict[str, str]:
    """This shell's variables without settings of a run, and with or without kept bytecode."""
    left_out = ("NSA_", "NCCL_", "CONFIG", _NO_BYTECODE)
    kept = {name: text for name, text in os.environ.items() if not name.startswith(left_out)}
    return kept if bytecode else {**kept, _NO_BYTECODE: "1"}


def with_harness(
    folder: Path, asked: Sequence[str], environment: Mapping[str, str]
) -> tuple[float, list[Mapping[str, Any]]]:
    """One run; its processor time, and the launches that it started in their order."""
    words = [sys.executable, "-P", "-m", "runbook", "run", *asked, "--out", str(folder / "runs")]
    spent = timed(words, folder, environment)
    found = sorted((folder / "runs").glob("*/*/*/launch.json"), key=lambda p: p.stat().st_mtime)
    return spent, [json.loads(path.read_text()) for path in found]


def bare(
    folder: Path, launches: Sequence[Mapping[str, Any]], environment: Mapping[str, str]
) -> float:
    """The same launches without the harness; their processor time."""
    spent = 0.0
    for number, launch in enumerate(launches):
        own = folder / f"bare{number}"
        own.mkdir()
        spent += timed(launch["argv"], own, {**environment, **launch["env"]})
    return spent


def main() -> int:
    """Take turns, print, compare with what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--phase", default="baseline,single_gpu")
    parser.add_argument("--profile", default="cpu")
    parser.add_argument("--steps-scale", default="1")
    parser.add_argument("--without-bytecode", action="store_true")
    args = parser.parse_args()
    asked = ("--phase", args.phase, "--profile", args.profile, "--steps-scale", args.steps_scale)
    environment = plain_environment(bytecode=not args.without_bytecode)
    if not args.without_bytecode:
        with tempfile.TemporaryDirectory() as name:
            with_harness(Path(name), (*_FIRST, "--profile", args.profile), environment)
    ratios = []
    for number in range(1, args.rounds + 1):
        with tempfile.TemporaryDirectory() as name:
            spent, launches = with_harness(Path(name), asked, environment)
            alone = bare(Path(name), launches, environment)
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
