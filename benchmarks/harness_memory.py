"""The harness's memory while it watches a long run: python -m benchmarks.harness_memory [STEPS]

Writes what two ranks write in each step (heartbeats, training.csv, gates.csv) a piece at a time,
and after each piece does what the launcher does: follow the heartbeats, look at the numbers,
decide about hangs. Prints the resident size over the run and what a look costs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from runbook.launch.launcher import run_launch
from runbook.launch.watch.detectors import Monitor
from runbook.launch.watch.ranks import RankWatch
from runbook.launch.watch.watchdog import Budgets, Thresholds, Watchdog

PIECE = 500
HEADER = "step,loss,lr,toks_per_s,tokens,dt_s,grad_norm,mem_mib,arm,block,warmup,fetch_s,host_s\n"


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def beats(step: int, rank: int) -> str:
    shared = {"ts": time.time(), "mono": time.monotonic(), "rank": rank, "pid": os.getpid(),
              "token": "ab" * 16, "step": step, "phase": "step", "rss_mib": 300.0}  # fmt: skip
    events: list[dict[str, object]] = [
        {"event": "step_start"},
        {"event": "fetched"},
        {"event": "progress", "loss": 5.5, "toks_per_s": 9000.0 + step % 7},
        {"event": "step_end"},
    ]
    return "".join(json.dumps(event | shared) + "\n" for event in events)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    assert run_launch  # all that the launcher imports is resident
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "training.csv").write_text(HEADER)
        watch = RankWatch(folder, "ab" * 16, time.monotonic())
        watchdog = Watchdog(Budgets(), wanted=2)
        monitor = Monitor(folder, Thresholds())
        sizes, spent = [], 0.0
        for first in range(1, steps + 1, PIECE):
            piece = range(first, first + PIECE)
            for rank in (0, 1):
                with (folder / f"heartbeat_rank{rank}.jsonl").open("a") as stream:
                    stream.writelines(beats(step, rank) for step in piece)
            with (folder / "training.csv").open("a") as stream:
                stream.writelines(
                    f"{s},5.5,0.1,{9000 + 7.31 * (s % 11):.3f},64,0.1,1.0,300.0,,0,0,0.0,0.0\n"
                    for s in piece
                )
            began = time.process_time()
            watch.update()
            assert monitor.look() == []
            assert watchdog.find_hang(list(watch.ranks.values()), now=time.monotonic()) is None
            spent += time.process_time() - began
            sizes.append(resident_mib())
        assert watch.ranks[1].step == steps
    settled = sizes[len(sizes) // 5 :]
    print(f"{steps} steps: {max(sizes):.1f} MiB at most; after a fifth of the run "
          f"{min(settled):.1f} to {max(settled):.1f} MiB "
          f"(+-{(max(settled) - min(settled)) / 2 / max(settled):.2%}); "
          f"{spent / steps * 1e6:.1f} us of processor per step of both ranks")  # fmt: skip


if __name__ == "__main__":
    main()
