"""Real A/A of the fused arms: python -m benchmarks.aa_fused [--runs 60] [--out aa_fused]

Runs `runbook run --phase fused_adamw --aa --profile cpu` so often, every second time beside a
neighbor: a busy loop on one core that comes and goes, 0.5 to 20 s at a time. Both arms are the same
optimizer, so a row `keep` that is not a plain PASS is an alarm, whichever arm looks better.

What is done stays in OUT/results.jsonl, and the same command goes on from there. Exit status 1 if
there are more alarms than `--allowed`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

CHECK = "fused_adamw.keep"
SHORTEST_S, LONGEST_S = 0.5, 20.0
RUN_LIMIT_S = 600
# On the last core that is ours, until it is stopped or its parent is gone.
LOOP = """
import os
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
parent = os.getppid()
while os.getppid() == parent:
    sum(range(10_000))
"""


@contextmanager
def neighbor(seed: int) -> Iterator[None]:
    """A busy loop on one core that comes and goes; stays are log-uniform."""
    chance, leave = random.Random(seed), threading.Event()

    def come_and_go() -> None:
        busy = chance.random() < 0.5
        while not leave.is_set():
            stay_s = SHORTEST_S * (LONGEST_S / SHORTEST_S) ** chance.random()
            loop = subprocess.Popen([sys.executable, "-c", LOOP]) if busy else None
            try:
                leave.wait(stay_s)
            finally:
                if loop is not None:
                    loop.kill()
                    loop.wait()
            busy = not busy

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        yield
    finally:
        leave.set()
        thread.join()


def one_run(number: int, out: Path) -> dict[str, Any]:
    """One A/A with the number as its seed; what its record says of the check."""
    folder, busy = out / f"run{number:03d}", number % 2 == 1
    words = ["run", "--phase", "fused_adamw", "--aa", "--profile", "cpu", "--seed", str(number)]
    command = [sys.executable, "-m", "runbook", *words, "--out", str(folder), "--quiet"]
    began = time.monotonic()
    with neighbor(number) if busy else nullcontext():
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    records = sorted(folder.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    result: dict[str, Any] = {"run": number, "neighbor": busy, "exit": done.returncode}
    result["wall_s"] = round(time.monotonic() - began, 1)
    check = _check_of(records[-1]) if records else None
    if check is None:
        result |= {"outcome": "none", "code": "", "reason": (done.stdout + done.stderr)[-500:]}
    else:
        value = check.get("measurement") or {}
        result |= {name: check[name] for name in ("outcome", "code", "reason")}
        result |= {"ratio": value.get("value"), "interval": value.get("interval")}
    return result


def _check_of(path: Path) -> dict[str, Any] | None:
    record = json.loads(path.read_text("utf-8"))
    checks = (check for phase in record["phases"] for check in phase["checks"])
    return next((check for check in checks if check["id"] == CHECK), None)


def finished(path: Path) -> list[dict[str, Any]]:
    """What is done; a last line that was cut off is done again."""
    text = path.read_text("utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, "utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("aa_fused"))
    parser.add_argument("--allowed", type=int, default=1, help="alarms without exit status 1")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.jsonl"
    results = finished(path)
    done = {result["run"] for result in results}
    for number in range(options.runs):
        if number in done:
            continue
        result = one_run(number, options.out)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(result) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        results.append(result)
        beside = "beside a neighbor" if result["neighbor"] else "alone"
        print(f"{number:3d} {beside}, {result['wall_s']} s: {result['reason'][:150]}", flush=True)
    counts = Counter((result["neighbor"], result["outcome"]) for result in results)
    for (busy, outcome), count in sorted(counts.items()):
        print(f"{'beside a neighbor' if busy else 'alone'}: {outcome} {count}")
    alarms = sum((result["outcome"], result["code"]) != ("PASS", "ok") for result in results)
    print(f"{alarms} alarm(s) in {len(results)} runs")
    return 1 if alarms > options.allowed else 0


if __name__ == "__main__":
    sys.exit(main())
