"""Real launches of the trainer for the tests, and readers of what they wrote."""

from __future__ import annotations

import csv
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ROOT / "configs" / "cpu_smoke.yaml"


@dataclass(frozen=True)
class Ended:
    """What is left of a process that another worker of the tests has waited for."""

    returncode: int | None


@dataclass
class Launch:
    """A started trainer and its run directory."""

    process: subprocess.Popen[str]
    run_dir: Path
    log: Path

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "process": Ended(self.process.returncode)}

    def wait(self, timeout_s: float = 300) -> Launch:
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"no end in {timeout_s} s:\n{self.text()}") from None
        return self

    def end(self) -> None:
        """Kill what this launch started, by the process ids in its own heartbeats."""
        self.process.kill()
        for rank in range(2):
            for beat in self.beats(rank)[:1]:
                try:
                    os.kill(beat["pid"], signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def beats(self, rank: int = 0, event: str | None = None) -> list[dict[str, Any]]:
        path = self.run_dir / f"heartbeat_rank{rank}.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]
        found = [json.loads(line) for line in lines]
        return [beat for beat in found if event is None or beat["event"] == event]

    def exit(self, rank: int = 0) -> dict[str, Any]:
        found = self.beats(rank, "exit")
        assert len(found) == 1, self.text()
        return found[0]

    def effects(self, rank: int = 0, arm: str = "") -> dict[str, dict[str, Any]]:
        beats = self.beats(rank, "effect")
        return {beat["toggle"]: beat for beat in beats if beat["arm"] == arm}

    def rows(self) -> list[dict[str, str]]:
        with (self.run_dir / "training.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def column(self, name: str) -> list[float]:
        return [float(row[name]) for row in self.rows()]

    def env(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run_dir / "env.json").read_text())
        return content

    def until(self, ready: Callable[[Launch], bool], timeout_s: float = 180) -> Launch:
        """Wait until `ready`, or fail with the log."""
        give_up = time.monotonic() + timeout_s
        while not ready(self):
            if time.monotonic() > give_up or self.process.poll() is not None:
                self.end()
                raise AssertionError(f"not ready:\n{self.text()}")
            time.sleep(0.05)
        return self


def schedule(*arms: tuple[str, int, Mapping[str, str]], warmup_steps: int = 3) -> str:
    """What `--arms` takes: names, steps and toggles of the blocks."""
    blocks = [
        {"block": number, "arm": arm, "steps": steps, "set": dict(toggles)}
        for number, (arm, steps, toggles) in enumerate(arms)
    ]
    told = {"schema_version": 1, "warmup_steps": warmup_steps, "blocks": blocks}
    return json.dumps(told)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(toggles: Mapping[str, str]) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NSA_", "RUNBOOK_", "NCCL_"))}
    kept.pop("CONFIG", None)
    return kept | {
        "OMP_NUM_THREADS": "1",
        "NSA_PREFILL_BATCHED": "1",
        **toggles,
    }


def start(
    folder: Path,
    args: Sequence[str],
    *,
    ranks: int = 1,
    toggles: Mapping[str, str] | None = None,
    fault: Sequence[str] = (),
    config: Path | None = SMOKE,
    harness: bool = True,
    before: Callable[[], None] | None = None,
) -> Launch:
    """Start the trainer (under torchrun for several ranks) into `folder/run`."""
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = folder / "run"
    program = ["-m", "nsa.inject", *fault, "--"] if fault else ["-m", "nsa.train"]
    command = [sys.executable, *program]
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
        address = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        command = [sys.executable, *torchrun, *address, *program]
    if config is not None:
        args = ["--config", str(config), *args]
    env = environment(toggles or {})
    if harness:
        env |= {"RUNBOOK_RUN_DIR": str(run_dir), "RUNBOOK_RUN_TOKEN": secrets.token_hex(8)}
    log = folder / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, *args],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            cwd=ROOT,
            preexec_fn=before,
        )
    return Launch(process=process, run_dir=run_dir, log=log)


def run(folder: Path, args: Sequence[str], **how: Any) -> Launch:
    """Start the trainer and wait for its end."""
    return start(folder, args, **how).wait()
