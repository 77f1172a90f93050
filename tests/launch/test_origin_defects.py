"""The defects of the scripts that this program replaces, each by name, so that none comes back."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from nsa.launch.output import Heartbeat
from runbook.folder.launch.evidence import read_training_csv
from runbook.launch import LaunchOptions, run_launch
from runbook.launch.observer import Observer
from runbook.launch.watch.watchdog import Thresholds
from runbook.process.reaper import carriers
from runbook.records import Launch, LaunchStatus
from runbook.tools.watch import Watcher
from tests.launch.helpers import FAST, At, fake_launch, run


def test_the_watchdog_could_not_read_a_heartbeat(tmp_path: Path) -> None:
    """The origin's watchdog looked for names that its trainer never wrote."""
    beat = Heartbeat(rank=0, token="ab" * 8)
    beat.open(tmp_path)
    beat.step, beat.phase = 41, "step"
    beat.write("step_start")
    watcher = Watcher(tmp_path, Thresholds(heartbeat_stall_s=300))
    assert watcher.look() == []
    state = watcher.ranks.ranks[0]
    assert (state.step, state.phase, state.pid) == (41, "step", os.getpid())
    assert state.handle is not None  # known as alive, by the file it has open
    beat.write("step_end")
    assert watcher.look() == [] and state.event == "step_end"
    beat.write("exit", code=11, reason="non-finite at step 41", steps_done=41)
    (anomaly,) = watcher.look()
    assert "non-finite at step 41" in anomaly.text


def test_every_sweep_arm_appended_to_one_training_csv(tmp_path: Path) -> None:
    launch = fake_launch(steps=3)
    run(launch, tmp_path)
    with pytest.raises(FileExistsError):
        how = LaunchOptions(run_root=tmp_path, observer=Observer(), budgets=FAST, retry=False)
        run_launch(launch, how)
    log = read_training_csv(tmp_path / launch.run_dir / "training.csv", relative_to=tmp_path)
    assert log.frame["step"].tolist() == [1, 2, 3] and not log.damaged


def test_sigusr1_killed_torchrun_and_the_ranks_went_on_as_orphans(tmp_path: Path) -> None:
    """The signals that killed the origin's launcher are sent to everything but the ranks."""
    prodded: list[int] = []

    def prod(launch: Launch) -> None:
        folder = tmp_path / launch.run_dir
        token = json.loads((folder / "launch.json").read_text())["run_token"]
        ranks = {
            json.loads(path.read_text().splitlines()[0])["pid"]
            for path in folder.glob("heartbeat_rank*.jsonl")
        }
        prodded.extend(set(carriers(token)) - ranks)
        for pid in prodded:
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGUSR2)

    result = run(fake_launch(steps=20), tmp_path, observer=At(3, prod))
    assert prodded
    assert (result.status, result.cause) == (LaunchStatus.COMPLETED, "")
