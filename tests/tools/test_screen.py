"""The operator's screen: what a run's files say, and no number that is not there."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.launch.watch.watchdog import Thresholds
from runbook.tools.screen import Screen
from tests.factory import files

TOKEN = "ab12ab12ab12ab12"


def beats(folder: Path, rank: int, *events: dict[str, object], ago_s: float = 0.0) -> None:
    """Append heartbeats of a rank that is this process."""
    about = {"rank": rank, "token": TOKEN, "pid": os.getpid(), "phase": "step", "rss_mib": 512.0}
    for number, event in enumerate(events):
        clock = {"ts": time.time() - ago_s, "mono": 5.0 + number}
        files.say(folder, rank, {**about, **clock, **event})


def progress(step: int, loss: object, rate: float = 1000.0) -> dict[str, object]:
    told = {"loss": loss, "toks_per_s": rate, "grad_norm": 0.5}
    return {"event": "progress", "step": step, **told}


def lines(folder: Path) -> list[str]:
    screen = Screen(folder, Thresholds(halt=False))
    screen.look()
    return screen.lines()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    env = {"effective": {"steps": 1000, "tokens_per_step": 500}, "config": {}}
    (tmp_path / "env.json").write_text(json.dumps(env))
    return tmp_path


def test_a_run_without_a_csv_is_told_from_its_heartbeats(run_dir: Path) -> None:
    saved = {"event": "checkpoint", "step": 103, "path": "checkpoints/step_100"}
    beats(run_dir, 0, {**saved, "seconds": 3.2, "held_up_s": 0.05}, ago_s=600)
    beats(run_dir, 0, {"event": "eval", "step": 200, "loss": 2.5, "seconds": 1.0})
    beats(
        run_dir,
        0,
        *(progress(step, 3.0 - step / 1000, 1000 + step % 2 / 8) for step in range(201, 251)),
    )
    beats(run_dir, 1, {"event": "step_end", "step": 250, "cuda_mib": 900, "reserved_mib": 2048.0})
    first, numbers, *ranks, checkpoint, incidents, unseen = lines(run_dir)
    # 750 steps of 500 tokens at 1,000 tok/s.
    assert first == f"{run_dir}  step 250/1000, 25 %, 6 min 15 s left"
    assert numbers.startswith("loss 2.7500  validation 2.5000 (step 200)  gradient norm 0.5")
    assert numbers.endswith("1,000 tok/s")
    assert ranks[0].startswith("rank 0  step 250  step, heard 0") and "host 512 MiB" in ranks[0]
    assert "GPU 2,048 MiB" in ranks[1]
    words = "checkpoint  step_100, 10 min 00 s old (3.2 s to write, training held up 0.05 s)"
    assert checkpoint == words
    assert incidents == "incidents  0"
    assert unseen == "not seen: use of the GPUs (nvidia-smi shows it)"


def test_the_end_is_told_with_its_reason_and_without_a_rate(run_dir: Path) -> None:
    end = {"event": "exit", "step": 250, "code": 13, "reason": "SIGTERM at step 250"}
    for rank in range(2):
        beats(run_dir, rank, progress(250, 2.0), end)
    first, numbers, *ranks = lines(run_dir)[:4]
    assert first.endswith("ended at step 250/1000, 25 %: SIGTERM at step 250 (code 13)")
    assert "tok/s" not in numbers and "left" not in first
    assert all("ended with code 13" in rank for rank in ranks)


def test_incidents_are_those_written_down_and_those_seen_now(run_dir: Path) -> None:
    old = {"kind": "loss_spike", "text": "loss 9 at step 7"}
    (run_dir / "anomalies.jsonl").write_text(json.dumps(old) + "\n")
    beats(run_dir, 0, progress(8, "nan"))
    found = lines(run_dir)
    assert "incidents  2, last: nonfinite_loss: loss nan at step 8" in found
    assert "loss nan  gradient norm 0.5" in found[1]


def test_what_is_not_known_is_not_invented(tmp_path: Path) -> None:
    beats(tmp_path, 0, {"event": "boot", "step": 0, "phase": "init"})
    found = lines(tmp_path)
    assert found[0] == f"{tmp_path}  step 0"
    assert found[1] == "no step has been told yet"
    assert "checkpoint  none yet" in found
    assert "not seen: how long the run is (no env.json yet)" in found


def test_a_finished_run_is_shown_and_left_as_it_is(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beats(run_dir, 0, progress(1000, 2.0), {"event": "exit", "step": 1000, "code": 0})
    before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    assert main(["watch", str(run_dir), "--once"]) == 0
    assert f"{run_dir}  ended at step 1000/1000, 100 %" in capsys.readouterr().out
    assert main(["watch", str(run_dir), "--interval", "0.1"]) == 0
    shown = capsys.readouterr()
    assert "ended at step 1000/1000" in shown.err and shown.out == ""
    assert {path.name: path.read_bytes() for path in run_dir.iterdir()} == before
