"""A trainer without torch: ranks that only sleep, and a log of a loss that falls.

python counting.py --ranks 2 --steps 60 --out out [--fault NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path


def train(args: argparse.Namespace, rank: int) -> None:
    """One rank: the first one writes metrics.csv; each tells in a file of its own that it lives."""
    noise = random.Random(rank)
    steps = {"deaf": 2 * args.steps, "short": args.steps // 2}.get(args.fault, args.steps)
    log = (args.out / "metrics.csv").open("a")
    alive = (args.out / f"alive_{rank}.jsonl").open("a")
    if rank == 0:
        print("global_step,train/loss,dt,tokens_per_second,norm", file=log, flush=True)
    while not (args.out / "metrics.csv").stat().st_size:
        time.sleep(0.01)  # a row before the header would be another fault
    for step in range(1, steps + 1):
        began = time.monotonic()
        time.sleep(args.pace)
        loss = {"flat": 2.0, "rising": 1.0 + step / 50}.get(args.fault, 4.0 - step / steps)
        loss = loss if args.fault == "flat" else loss + 0.02 * noise.random()
        loss = float("nan") if (args.fault, step) == ("nan", 30) else loss
        # A NaN that is printed as 0, and one step that a scaler leaves out.
        masked = args.fault == "masked" and step >= 30
        norm = "nan" if masked else "inf" if (args.fault, step) == ("overflow", 30) else "1.5"
        loss = 0.0 if masked else loss
        if step == 30 and (rank == args.ranks - 1 or args.fault == "hang"):
            fail(args.fault)
        # What the step took, not what it was to take: on a busy machine a sleep is longer.
        told = (time.monotonic() - began) / (5 if args.fault == "too_fast" else 1)
        said = "" if args.fault == "unsaid" and step % 7 == 0 else f"{loss:.4f}"
        if rank == 0:
            print(f"{step},{said},{told:.6f},,{norm}", file=log, flush=True)
        if not (args.fault == "behind" and rank and step > 40):
            print(json.dumps({"at": step}), file=alive, flush=True)
    if rank == 0:
        leave(args.out)


def leave(out: Path) -> None:
    """What trainers leave besides files: the newest checkpoint's link, a pipe, odd names."""
    (out / "latest").symlink_to("metrics.csv")
    (out / "cache").symlink_to(out.resolve().parent, target_is_directory=True)
    os.mkfifo(out / "ask")
    (out / "two\nlines.txt").write_text("1\n")
    Path(os.fsdecode(os.fsencode(out) + b"/of another locale \xff")).write_text("2\n")


def fail(fault: str) -> None:
    """What goes wrong in the middle of it, in the last rank; all wait for one that hangs."""
    if fault == "hang":
        time.sleep(600)
    if fault == "die":
        raise RuntimeError("the data at https://me:hunter22@store ended early")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--pace", type=float, default=0.02)
    parser.add_argument("--fault", default="none")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        train(args, int(os.environ["RANK"]))
        return 0
    ranks = 1 if args.fault == "one_rank" else args.ranks
    started = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": str(rank)})
        for rank in range(ranks)
    ]
    return max(abs(one.wait()) for one in started)


if __name__ == "__main__":
    sys.exit(main())
