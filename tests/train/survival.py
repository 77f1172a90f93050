"""Does a run that is killed end where one that is left alone ends? Bit for bit, on the CPU.

One run goes through. The other, side by side with it, gets signals at given steps, and goes on each
time by `--resume OUT/latest`. Both evaluate and save as they go. What has to be the same: every
step's loss, rate and gradient norm, every evaluation, and the parameters at the end.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import perf_counter, sleep

from nsa.contract import HEARTBEATS, LATEST_LINK, TRAINING_CSV, VAL_CSV, Event

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "cpu_smoke.yaml"


def compare(root: Path, steps: int, ranks: int, ends: list[tuple[signal.Signals, int]]) -> int:
    """Run through, run in pieces, and say whether they are the same."""
    whole, pieces = root / "whole", root / "pieces"
    begin = perf_counter()
    uninterrupted = start(whole, steps, ranks)
    try:
        in_pieces(pieces, steps, ranks, ends)
        print(f"uninterrupted: exit code {uninterrupted.wait()}")
    finally:
        uninterrupted.terminate()
    used = os.times()
    print(
        f"both: {perf_counter() - begin:.0f} s by the clock, "
        f"{used.children_user + used.children_system:.0f} s of processors"
    )
    return 0 if same(whole, pieces, steps) else 1


def same(whole: Path, pieces: Path, steps: int) -> bool:
    """Say whether both runs did all steps, and the same; where they part first, if they do."""
    one, two = facts(whole), facts(pieces)
    rows, evaluations = (len(two[name]) for name in ("steps", "evaluations"))  # type: ignore[arg-type]
    print(f"{rows} steps, {evaluations} evaluations, digest {two['digest']}")
    alike = one == two and rows == steps
    print("the same in every bit" if alike else f"DIFFERENT: {first_difference(one, two)}")
    return alike


def in_pieces(out: Path, steps: int, ranks: int, ends: list[tuple[signal.Signals, int]]) -> None:
    """The run that is ended and goes on, to its last step."""
    for number, (kind, step) in enumerate(ends):
        before = runs(out)
        process = start(out, steps, ranks, resume=number > 0)
        until(out, process, step, before=before)
        stop(out, process, kind)
        print(f"{kind.name} after step {step}: exit code {process.wait()}")
    process = start(out, steps, ranks, resume=True)
    print(f"last piece: exit code {process.wait()}")


def start(out: Path, steps: int, ranks: int, *, resume: bool = False) -> subprocess.Popen[bytes]:
    """A launch by hand that saves about twenty times."""
    every = max(1, steps // 20)
    settings = {"save_every": every, "eval_every": every, "keep_last": 3}
    program = [sys.executable]
    if ranks > 1:
        program += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    words = ["--config", str(CONFIG), "--dataset", "markov", "--ddp", str(int(ranks > 1)), "--save"]
    words += ["--seq-len", "32", "--steps", str(steps), "--out-dir", str(out), "--log-every", "500"]
    words += [word for key, n in settings.items() for word in ("--set", f"train.{key}={n}")]
    words += ["--resume", str(out / LATEST_LINK)] if resume else []
    env = {k: v for k, v in os.environ.items() if not k.startswith("NSA_")}
    env |= {"NSA_PREFILL_BATCHED": "1", "OMP_NUM_THREADS": "1"}
    out.mkdir(exist_ok=True)
    with (out / "console.log").open("ab") as log:
        return subprocess.Popen([*program, "-m", "nsa.train", *words], env=env, stderr=log)


def until(out: Path, process: subprocess.Popen[bytes], step: int, *, before: list[Path]) -> None:
    """Wait until the run that is none of those before has done this step.

    Raises RuntimeError if the process ends first.
    """
    # The one before may have done it too: it did some more steps until its signal came.
    while not (new := runs(out)[len(before) :]) or last_step(new[0]) < step:
        if process.poll() is not None:
            raise RuntimeError(f"ended before step {step}: see {out / 'console.log'}")
        sleep(0.02)


def runs(out: Path) -> list[Path]:
    """The folders of all runs, oldest first."""
    return sorted(out.glob("2*/"))


def last_step(folder: Path) -> int:
    """The last step that a run has told; 0 before its first."""
    table = folder / TRAINING_CSV
    lines = table.read_bytes().split(b"\n") if table.is_file() else []
    last = lines[-2].partition(b",")[0] if len(lines) > 1 else b""
    return int(last) if last.isdigit() else 0


def stop(out: Path, process: subprocess.Popen[bytes], kind: signal.Signals) -> None:
    """The signal, to every rank of the newest run by the process id in its heartbeats."""
    folder = out / LATEST_LINK
    for path in HEARTBEATS.found_in(folder).values():
        with path.open() as lines:
            os.kill(json.loads(lines.readline())["pid"], kind)
    process.wait()


def rows(out: Path, name: str) -> dict[int, list[str]]:
    """What every step was told to be by the newest run that did it, without times and memory."""
    found = {}
    for path in sorted(out.glob(f"2*/{name}")):
        with path.open(newline="") as lines:
            for row in csv.DictReader(lines):
                if None not in row.values():
                    kept = ("loss", "lr", "grad_norm", "tokens")
                    found[int(row["step"])] = [row[key] for key in kept if key in row]
    return found


def facts(out: Path) -> dict[str, object]:
    """All that has to be the same."""
    path = out / LATEST_LINK / HEARTBEATS.name(0)
    end = json.loads(path.read_text().splitlines()[-1])
    digest = end["param_hash"] if end["event"] == Event.EXIT else None
    return {"steps": rows(out, TRAINING_CSV), "evaluations": rows(out, VAL_CSV), "digest": digest}


def first_difference(one: dict[str, object], two: dict[str, object]) -> str:
    """Where the two part."""
    for name in ("steps", "evaluations"):
        left, right = one[name], two[name]
        assert isinstance(left, dict) and isinstance(right, dict)
        for step in sorted(left.keys() | right.keys()):
            if left.get(step) != right.get(step):
                return f"{name}, step {step}: {left.get(step)} and {right.get(step)}"
    return f"parameters: {one['digest']} and {two['digest']}"
