"""What a launch starts ends with it, also where it has left session, parents and environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runbook.launch import StopRequest
from runbook.process import end_kept, spawn_kept
from runbook.process.reaper import carriers, environment_holds
from runbook.records import Launch, LaunchStatus
from tests.launch.helpers import FAKE, At, fake_launch, run
from tests.launch.test_faults import HARNESS
from tests.shared import alive, gone

PATH = {"PATH": os.environ["PATH"]}


def bare(run_dir: Path) -> int:
    """The pid of the daemon that a fake trainer started."""
    note = run_dir / "bare.pid"
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        if note.exists() and note.read_text().endswith("\n"):
            return int(note.read_text())
        time.sleep(0.01)
    raise AssertionError("no daemon was started")


def lives(root: Path, launch: Launch) -> bool:
    """Does the daemon of a launch live, and carry nothing of it?"""
    pid = bare(root / launch.run_dir)
    return alive(pid) and Path(f"/proc/{pid}/environ").read_bytes() == b""


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("", LaunchStatus.COMPLETED),
        ("sigkill", LaunchStatus.CRASHED),
        ("hang", LaunchStatus.HUNG),
    ],
)
def test_a_daemon_without_environment_ends_with_its_launch(
    tmp_path: Path, fault: str, status: LaunchStatus
) -> None:
    launch = fake_launch("--bare", *(("--fault", fault) if fault else ()))
    lived: list[bool] = []
    result = run(launch, tmp_path, observer=At(2, lambda _: lived.append(lives(tmp_path, launch))))
    assert (result.status, lived) == (status, [True])
    assert not alive(bare(tmp_path / launch.run_dir))


def test_a_daemon_without_environment_ends_below_torchrun_too(tmp_path: Path) -> None:
    """Rank 0 of a real torchrun starts it; an interrupt ends the launch."""
    words = ("torchrun", "--nproc_per_node=2", FAKE, "--steps", "100000", "--bare")
    launch = fake_launch(steps=100_000).model_copy(update={"argv": words})
    stop, lived = StopRequest(), list[bool]()

    def look(_: Launch) -> None:
        lived.append(lives(tmp_path, launch))
        stop.request("SIGTERM")

    result = run(launch, tmp_path, observer=At(2, look), stop=stop)
    assert (result.status, lived) == (LaunchStatus.INTERRUPTED, [True])
    assert not alive(bare(tmp_path / launch.run_dir))


@pytest.mark.parametrize("victim", ["harness", "starter"])
def test_a_daemon_without_environment_ends_with_what_is_killed(tmp_path: Path, victim: str) -> None:
    launch = fake_launch("--bare", "--deaf", steps=100_000)
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, launch.model_dump_json(), str(tmp_path)]
    )
    run_dir = tmp_path / launch.run_dir
    daemon = bare(run_dir)
    heartbeats = run_dir / "heartbeat_rank1.jsonl"
    while not heartbeats.exists() or b"step_end" not in heartbeats.read_bytes():
        time.sleep(0.01)
    assert alive(daemon)
    pid = harness.pid
    if victim == "starter":
        rank = int(json.loads(heartbeats.read_text().splitlines()[0])["pid"])
        pid = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)
    token = json.loads((run_dir / "launch.json").read_text())["run_token"]
    left = [daemon, *carriers(token)]
    assert [pid for pid in left if not gone(pid, within_s=1.0)] == []
    harness.wait(20)
    assert carriers(token) == []


def kept(
    tmp_path: Path, *command: str, variables: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    with (tmp_path / "console").open("wb") as output:
        return spawn_kept(command, PATH | (variables or {}), output=output, cwd=tmp_path)


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", -9), ("kill -ABRT $$", -6),
     ("kill -TERM $$", -15), ("kill -SEGV $$", -11)],
)  # fmt: skip
def test_the_subreaper_ends_as_its_command_did(tmp_path: Path, script: str, code: int) -> None:
    child = kept(tmp_path, "sh", "-c", script)
    assert child.wait(10) == code
    end_kept(child)
    assert list(tmp_path.glob("core*")) == []


def test_a_command_that_is_not_there_is_told(tmp_path: Path) -> None:
    child = kept(tmp_path, "no-such-program")
    assert child.wait(10) == 127
    end_kept(child)
    assert "cannot start no-such-program" in (tmp_path / "console").read_text()


def test_the_subreaper_carries_no_token_and_is_deaf_to_who_signals_its_command(
    tmp_path: Path,
) -> None:
    """A `kill 0` of the command, or a signal to each process by somebody, opens no cage."""
    script = "trap '' TERM; kill -TERM 0; sleep 600 & echo ready; wait"
    child = kept(tmp_path, "sh", "-c", script, variables={"RUNBOOK_RUN_TOKEN": "ab" * 8})
    while b"ready" not in (tmp_path / "console").read_bytes():
        time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        child.send_signal(number)
    time.sleep(0.1)
    assert child.poll() is None
    assert not environment_holds(child.pid, "ab" * 8)
    assert len(carriers("ab" * 8)) == 2
    end_kept(child)
    assert (child.returncode, carriers("ab" * 8)) == (-9, [])


def test_a_subreaper_takes_leave_of_those_that_end(tmp_path: Path) -> None:
    """Orphans that ended while the command goes on stay no zombies: they would fill the table."""
    script = "for i in 1 2 3; do (sleep 0.05 &); done; sleep 0.5; echo ready; sleep 600"
    child = kept(tmp_path, "sh", "-c", script)
    while b"ready" not in (tmp_path / "console").read_bytes():
        time.sleep(0.01)
    folder = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    assert len(folder.read_text().split()) == 1
    end_kept(child)
