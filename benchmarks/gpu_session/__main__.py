"""Everything that only a GPU can answer, in stages: `make gpu`.

    python -m benchmarks.gpu_session [--stage LIST] [--out DIR] [--until-s S] [--again]
        [--stand-in] [--dry-run]

Each stage starts programs, with one time limit for the stage and a log for each program; nothing
that a program started outlives it. One folder comes back: summary.md and summary.json say how every
stage stands, the stages' folders have the rest. They are written before and after each stage, so
that whatever ends a call, the next one goes on with what is not finished.

Exits with 0 where all stages passed, 1 where one failed, 2 without a GPU, and 3 where one is cut
off, undecided or has not run.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_session.session import Session
from benchmarks.gpu_session.stages import ROOT, STAGES, Place, Stage
from runbook.process import run_tool


def _device() -> str:
    """The first GPU's name for a folder, with their number where there are several."""
    asked = run_tool(("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"), timeout_s=60)
    names = [line.strip() for line in asked.stdout.splitlines() if line.strip()]
    if asked.problem or not names:
        why = asked.problem or "nvidia-smi lists none"
        print(f"no GPU: {why}; --stand-in rehearses every stage on the CPU", file=sys.stderr)
        raise SystemExit(2)
    count = f"{len(names)}x-" if len(names) > 1 else ""
    return count + re.sub(r"[^A-Za-z0-9.]+", "-", names[0]).strip("-")


def chosen(text: str) -> list[Stage]:
    """The stages of a comma-separated list, in their order; all for an empty one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [stage.name for stage in STAGES]
    if wrong := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}; there are: {', '.join(known)}")
    return [stage for stage in STAGES if not names or stage.name in names]


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_session",
                                     description=(__doc__ or "").partition("\n")[0])  # fmt: skip
    add = parser.add_argument
    add("--stage", type=chosen, default=list(STAGES), metavar="LIST", help="only these")
    add("--out", type=Path, default=ROOT / "artifacts" / "gpu-session", metavar="DIR",
        help="gets a folder named after the device")  # fmt: skip
    add("--until-s", type=float, metavar="S", help="end this call within S seconds")
    add("--again", action="store_true", help="repeat stages that have ended; their files are kept")
    add("--stand-in", action="store_true", help="a rehearsal on the CPU, marked as such")
    add("--dry-run", action="store_true", help="print the commands and their limits")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _options(words)
    if options.dry_run:
        for stage in options.stage:
            print(f"# {stage.name}: {stage.title}; at most {stage.limit_s:g} s")
            place = Place(folder=options.out / "DEVICE" / stage.name, stand_in=options.stand_in,
                          told_s=stage.limit_s)  # fmt: skip
            for program in stage.programs(place):
                print(shlex.join(program.words))
        return 0
    device = "STAND-IN" if options.stand_in else _device()
    session = Session.taken_up(
        (options.out / device).resolve(),
        again=[stage.name for stage in options.stage] if options.again else [],
        device=device,
        stages=STAGES,
        stand_in=options.stand_in,
        until_s=options.until_s,
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    session.run(options.stage)
    print(f"\n{session.page()}\nfolder  {session.out}")
    return session.code


if __name__ == "__main__":
    sys.exit(main())
