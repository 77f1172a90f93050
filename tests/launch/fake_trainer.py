"""A small real program that writes a trainer's files and can misbehave in every way asked of it.

Standard library only. Without RANK in the environment it starts `--nproc` ranks itself, or that of
its node, and reports the first failure as torchrun does; under torchrun it is one rank.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HEADER = "step,loss,lr,toks_per_s,tokens,dt_s,grad_norm,mem_mib,arm,block,warmup,fetch_s"

LEAVES = {
    "raise": (1, "ValueError: injected"),
    "nccl": (1, "DistBackendError: NCCL error: unhandled system error"),
    "oom": (12, "out of memory: injected"),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, number in (("steps", 5), ("nproc", 2), ("at", 3), ("on-rank", 1)):
        parser.add_argument(f"--{name}", type=int, default=number)
    for name, seconds in (("dt", 0.02), ("slow-first", 0.0), ("checkpoint", 0.0)):
        parser.add_argument(f"--{name}", type=float, default=seconds)
    parser.add_argument("--once", default="", help="misbehave only if this file is absent")
    for name in ("fault", "arms", "config", "dataset", "ddp", "resume"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--grandchild", action="store_true")
    parser.add_argument("--bare", action="store_true", help="a grandchild without environment")
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    return parser.parse_args()


class Rank:
    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.options, self.rank = options, rank
        self.folder = Path(os.environ["RUNBOOK_RUN_DIR"])
        self.token = os.environ["RUNBOOK_RUN_TOKEN"]
        self.step, self.phase, self.ending = 0, "init", False
        self.enough_at = 0
        self.entered: list[list[object]] = []
        self.beats = (self.folder / f"heartbeat_rank{rank}.jsonl").open("a", buffering=1)
        stacks = (self.folder / f"stackdump_rank{rank}_{os.getpid()}.txt").open("w")
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN if options.deaf else self.end_soon)

    def end_soon(self, number: int, frame: object) -> None:
        self.ending = True

    def say(self, event: str, **fields: object) -> None:
        record = {"event": event, "ts": time.time(), "mono": time.monotonic(), "rank": self.rank}
        record |= {"pid": os.getpid(), "token": self.token, "step": self.step, "phase": self.phase}
        record |= {"rss_mib": 10.0, "cuda_mib": None}
        self.beats.write(json.dumps(record | fields) + "\n")

    def leave(self, code: int, reason: str) -> int:
        self.phase = "exit"
        record = {"schema_version": 1, "rank": self.rank, "token": self.token}
        path = self.folder / f"flight_rank{self.rank}.json"
        path.write_text(json.dumps(record | {"entries": self.entered}))
        self.say("exit", code=code, reason=reason, steps_done=self.step, param_hash="cafe")
        return code

    def run(self) -> int:
        options = self.options
        self.say("boot")
        if self.rank == 0:
            (self.folder / "env.json").write_text(json.dumps({"argv": sys.argv, "world_size": 2}))
            self.csv = (self.folder / "training.csv").open("a", buffering=1)
            self.csv.write(HEADER + "\n")
        for step, arm, block, warmup in self.schedule():
            self.step, self.phase = step, "first_step" if step == 1 else "step"
            self.say("step_start")
            time.sleep(options.slow_first if step == 1 else options.dt)
            if step == options.at and self.rank == options.on_rank and self.misbehaves():
                code = self.fault(options.fault)
                if code is not None:
                    return code
            if options.fault in ("nan", "halt") and step == options.at and self.misbehaves():
                code = {"nan": 11, "halt": 10}[options.fault]
                return self.leave(code, f"agreed {options.fault} at step {step}")
            if self.rank == 0:
                self.csv.write(
                    f"{step},5.5,0.001,{512 / options.dt},512,{options.dt},1.0,10.0,"
                    f"{arm},{block},{int(warmup)},0.0\n"
                )
            self.say("progress", loss=5.5, toks_per_s=512 / options.dt)
            self.say("step_end")
            if options.checkpoint and step == 2 and self.rank == 0:
                self.phase = "checkpoint"
                self.say("checkpoint_start")
                time.sleep(options.checkpoint)
            if not self.enough_at and (self.folder / ".ENOUGH").exists():
                self.enough_at = step
            self.enter("all_reduce", [[1000]])
            enough = self.agree_with_peers(step)
            self.enter("all_reduce", [[5]])
            if self.ending:
                return self.leave(13, "asked to end")
            if enough:
                self.say("enough")
                break
        return self.leave(0, "done")

    def schedule(self) -> list[tuple[int, str, int, bool]]:
        if not self.options.arms:
            return [(step, "", 0, False) for step in range(1, self.options.steps + 1)]
        document = json.loads(Path(self.options.arms).read_text())
        rows: list[tuple[int, str, int, bool]] = []
        for block in document["blocks"]:
            for index in range(document["warmup_steps"] + block["steps"]):
                warm = index < document["warmup_steps"]
                rows.append((len(rows) + 1, block["arm"], block["block"], warm))
        return rows

    def enter(self, op: str, sizes: list[list[int]]) -> None:
        """A line of the flight record: this rank comes to a collective now."""
        self.entered.append([len(self.entered) + 1, op, sizes, ["Float"], time.time_ns(), True])

    def agree_with_peers(self, step: int) -> bool:
        """A collective: nobody goes on before all have come, and nothing Python runs meanwhile.

        True if any rank had seen by this step that enough is known: all leave after the same one.
        """
        (self.folder / f".at_{self.rank}").write_text(f"{step} {self.enough_at}\n")
        while not self.ending:
            places = [self.folder / f".at_{rank}" for rank in range(self.options.nproc)]
            texts = [place.read_text() if place.exists() else "" for place in places]
            if all(text.endswith("\n") and int(text.split()[0]) >= step for text in texts):
                return any(0 < int(text.split()[1]) <= step for text in texts)
            time.sleep(0.005)
        return False

    def misbehaves(self) -> bool:
        if not self.options.once:
            return True
        mark = Path(self.options.once)
        if mark.exists():
            return False
        mark.touch()
        return True

    def fault(self, kind: str) -> int | None:
        if kind == "exit7":
            os._exit(7)
        elif kind == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "segv":
            ctypes.string_at(0)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind in ("hang", "data"):
            if kind == "data":
                self.phase = "data"
                self.say("fetch")
            while True:
                time.sleep(1)
        elif kind == "watchdog":
            words = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, ALLREDUCE)"
            print(f"[rank{self.rank}]:[E ProcessGroupNCCL.cpp:632] {words}", flush=True)
            os.abort()
        elif kind in ("allocate", "fill"):
            try:
                self.take_too_much(kind)
            except (MemoryError, OSError) as error:
                return self.leave(1, f"{type(error).__name__}: {error}")
        return self.leave(*LEAVES[kind]) if kind in LEAVES else None

    def take_too_much(self, kind: str) -> None:
        """Memory, or the disk: as a trainer does that removes what it could not write whole."""
        if kind == "allocate":
            bytearray(1 << 41)
        part = self.folder / "part.tmp"
        try:
            with part.open("wb", buffering=0) as file:
                for _ in range(64):
                    file.write(bytes(1 << 16))
                    time.sleep(0.02)
        finally:
            part.unlink()


def start_bare() -> None:
    """A daemon as the books have it, which also empties its environment: nothing tells of us."""
    line = "setsid env -i sleep 600 <&- >&- 2>&- & echo $!"
    pid = int(subprocess.check_output(["sh", "-c", line]))
    # Told once it is bare, so that who reads of it knows that it lived so.
    while Path(f"/proc/{pid}/environ").read_bytes():
        time.sleep(0.001)
    Path(os.environ["RUNBOOK_RUN_DIR"], "bare.pid").write_text(f"{pid}\n")


def ranks_here(nproc: int) -> Sequence[int]:
    """All of them; on a node (`n1`) the one that has its number."""
    node = os.environ.get("RUNBOOK_NODE_FOLDER")
    return [int(Path(node).name[1:])] if node else range(nproc)


def start_ranks(options: argparse.Namespace) -> int:
    if options.fault == "config":
        print("fake_trainer: error: --colour is unknown", flush=True)
        return 2
    if options.grandchild:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    children = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": str(rank)})
        for rank in ranks_here(options.nproc)
    ]
    while True:
        for rank, child in enumerate(children):
            if child.poll() not in (None, 0):
                print(
                    f"failed (exitcode: {child.returncode}) local_rank: {rank} (pid: {child.pid})"
                )
                sys.stdout.flush()
                for peer in children:
                    peer.send_signal(signal.SIGTERM)
                # A peer may be in a step: torchrun too waits before it kills.
                over = time.monotonic() + (30 if options.deaf else 1)
                while time.monotonic() < over and any(peer.poll() is None for peer in children):
                    time.sleep(0.01)
                for peer in children:
                    peer.kill()
                return 1
        if all(child.poll() == 0 for child in children):
            time.sleep(600 if options.fault == "linger" else 0)
            return 0
        time.sleep(0.01)


if __name__ == "__main__":
    options = arguments()
    if options.bare and os.environ.get("RANK") == "0":
        start_bare()
    if "RANK" in os.environ:
        sys.exit(Rank(options, int(os.environ["RANK"])).run())
    sys.exit(start_ranks(options))
