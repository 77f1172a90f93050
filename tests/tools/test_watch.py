"""`runbook watch` beside processes that nobody here started for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from runbook.cli import main
from runbook.cli.live import newest
from runbook.launch.watch.watchdog import Thresholds
from runbook.process import process_state
from runbook.tools.watch import Screen, live_stacks
from tests.factory import files

TOKEN = "ab12ab12ab12ab12"

# A rank as far as a watcher can see: heartbeats, a stack file on SIGUSR1, and then silence.
RANK = """
import faulthandler, json, os, signal, sys, time
folder, rank = sys.argv[1], int(sys.argv[2])
stacks = open(f"{folder}/stackdump_rank{rank}_{os.getpid()}.txt", "w")
faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
beats = open(f"{folder}/heartbeat_rank{rank}.jsonl", "a", buffering=1)
def say(event, **more):
    beats.write(json.dumps({"event": event, "ts": time.time(), "mono": time.monotonic(),
        "rank": rank, "pid": os.getpid(), "token": "ab12ab12ab12ab12", "step": 3,
        "phase": "step"} | more) + "\\n")
say("step_start")
say("step_end")
def lost_in_thought():
    time.sleep(60)
lost_in_thought()
"""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two live ranks without a token in their environment, as a person would start them."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RUNBOOK_")}
    started = [
        subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), str(rank)], env=clean)
        for rank in (0, 1)
    ]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        texts = [p.read_text() for p in tmp_path.glob("heartbeat_rank*.jsonl")]
        if len(texts) == 2 and all("step_end" in text for text in texts):
            break
        time.sleep(0.02)
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_a_stall_is_found_with_stacks_and_halted(
    tmp_path: Path, ranks: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(ranks[1].pid, signal.SIGSTOP)
    while process_state(ranks[1].pid) != "T":
        time.sleep(0.01)
    watcher = Screen(tmp_path, Thresholds(heartbeat_stall_s=300))
    reader = Screen(tmp_path, Thresholds(heartbeat_stall_s=300, halt=False))
    assert watcher.look() == reader.look() == []
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 301)
    monkeypatch.setattr("runbook.tools.watch.time", later)
    (seen,) = reader.look()
    assert (seen.kind, seen.rank) == ("heartbeat_stall", 1)
    names = {path.name.split("_rank")[0] for path in tmp_path.iterdir()}
    assert names == {"heartbeat", "stackdump"}, "whoever only reads writes nothing"
    assert all(not path.read_text() for path in tmp_path.glob("stackdump*"))
    (anomaly,) = watcher.look()
    assert (anomaly.kind, anomaly.rank) == ("heartbeat_stall", 1)
    assert "frozen: rank 1 is stopped" in anomaly.text
    assert (tmp_path / ".HALT").read_text().startswith("heartbeat_stall")
    assert "lost_in_thought" in next(tmp_path.glob("stackdump_rank0_*")).read_text()
    assert json.loads((tmp_path / "incident.json").read_text())["ranks"][1]["process_state"] == "T"
    assert watcher.look() == []  # told once
    assert not watcher.over


def test_stacks_of_live_ranks_only(
    tmp_path: Path, ranks: list[subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = live_stacks(tmp_path)
    assert [stack.rank for stack in found] == [0, 1]
    assert all("lost_in_thought" in stack.stack for stack in found)
    assert all(rank.poll() is None for rank in ranks), "asking must not end a rank"
    ranks[1].kill()
    ranks[1].wait()
    assert main(["watch", "--stacks", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["ranks"]
    assert [(row["rank"], row["phase"], row["step"]) for row in shown] == [(0, "step", 3)]
    # The second dump is appended to the file; only it is shown.
    assert shown[0]["stack"].count("lost_in_thought") == 1


def test_a_stranger_with_a_ranks_number_gets_no_signal(tmp_path: Path) -> None:
    """A pid in an old heartbeat may belong to anybody by now; SIGUSR1 would kill it."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        line = {"event": "step_end", "token": TOKEN, "pid": stranger.pid, "step": 3, "rank": 0}
        (tmp_path / "heartbeat_rank0.jsonl").write_text(json.dumps(line) + "\n")
        assert live_stacks(tmp_path) == []
        assert main(["watch", "--stacks", str(tmp_path)]) == 3
        time.sleep(0.1)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_watch_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path), "--once"]) == 2  # nothing to watch there
    header = "step,loss,lr,toks_per_s\n"
    (tmp_path / "training.csv").write_text(header + "1,5.5,0.1,100.125\n2,nan,0.1,101.5\n")
    assert main(["watch", str(tmp_path), "--once", "--halt", "0", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["kind"] == "nonfinite_loss"
    assert main(["watch", str(tmp_path), "--once"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["training.csv"]
    assert main(["watch", str(tmp_path), "--once", "--halt"]) == 1
    assert (tmp_path / ".HALT").exists()
    assert main(["watch", str(tmp_path), "--interval", "-1"]) == 2


@pytest.mark.parametrize("more", [("--once",), ("--interval", "0.1")])
def test_a_run_without_a_csv_is_not_watched_blindly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    for event in ("step_end", "progress", "exit"):
        told = {"loss": "nan", "toks_per_s": 100.125} if event == "progress" else {"code": 0}
        files.say(tmp_path, 0, {"event": event, "token": TOKEN, "step": 1, "rank": 0, **told})
    assert main(["watch", str(tmp_path), *more, "--json", "--quiet"]) == 1
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert (found["kind"], found["path"]) == ("nonfinite_loss", "heartbeat_rank0.jsonl")
    assert "losses, gradients, rates and memory are read from heartbeat_rank0.jsonl" in shown.err
    assert "warning: gates are not watched: no gates.csv" in shown.err


def test_a_run_without_a_csv_is_told_from_its_heartbeats(tmp_path: Path) -> None:
    env = {"effective": {"steps": 1000, "tokens_per_step": 500}, "config": {}}
    (tmp_path / "env.json").write_text(json.dumps(env))

    def say(rank: int, event: str, step: int, ago_s: float = 0.0, **more: object) -> None:
        about = {"rank": rank, "token": TOKEN, "pid": os.getpid(), "phase": "step"}
        clock = {"ts": time.time() - ago_s, "mono": 5.0 + step, "rss_mib": 512.0}
        files.say(tmp_path, rank, {**about, **clock, "event": event, "step": step, **more})

    saved = {"path": "checkpoints/step_100", "seconds": 3.2, "held_up_s": 0.05}
    say(0, "checkpoint", 103, ago_s=600, **saved)
    say(0, "eval", 200, loss=2.5, seconds=1.0)
    for step in range(201, 251):
        rate = 1000 + step % 2 / 8
        say(0, "progress", step, loss=3.0 - step / 1000, toks_per_s=rate, grad_norm=0.5)
    say(1, "step_end", 250, cuda_mib=900, reserved_mib=2048.0)
    screen = Screen(tmp_path, Thresholds(halt=False))
    screen.look()
    first, numbers, *ranks, checkpoint, incidents, unseen = screen.lines()
    # 750 steps of 500 tokens at 1,000 tok/s.
    assert first == f"{tmp_path}  step 250/1000, 25 %, 6 min 15 s left"
    assert numbers.startswith("loss 2.7500  validation 2.5000 (step 200)  gradient norm 0.5")
    assert numbers.endswith("1,000 tok/s")
    assert ranks[0].startswith("rank 0  step 250  step, heard 0") and "host 512 MiB" in ranks[0]
    assert "GPU 2,048 MiB" in ranks[1]
    words = "checkpoint  step_100, 10 min 00 s old (3.2 s to write, training held up 0.05 s)"
    assert (checkpoint, incidents) == (words, "incidents  0")
    assert unseen == "not seen: use of the GPUs (nvidia-smi shows it)"


def test_a_launch_that_is_gone_again_is_not_the_one_that_wrote_last(tmp_path: Path) -> None:
    """Its folder may be kept aside between a look at its name and one at its time."""
    for name in ("run1", "run2"):
        (tmp_path / name).mkdir()
    (tmp_path / "run1/training.csv").write_text("")
    (tmp_path / "run2/training.csv").symlink_to("gone")
    assert newest(tmp_path) == tmp_path / "run1"
