"""How a process ended, by the kernel's own word; what a launch starts ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsa.contract import RUN_TOKEN_VARIABLE
from runbook import process
from runbook.launch.watch import RankWatch
from runbook.process import carriers, end_kept, environment_holds, spawn_kept
from tests.factory.files import record, write_beats
from tests.factory.tables import table
from tests.launch.helpers import fake_launch, harness
from tests.shared import alive, gone


@table(__file__, "control_groups")
def test_what_the_files_of_control_groups_say(
    tmp_path: Path, ask: str, files: dict[str, str], membership: str, count: int | None
) -> None:
    """In the kernel's files of control groups, and in the one that names those of a process."""
    for name, text in {**files, "self": membership}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert getattr(process, ask)(tmp_path, tmp_path / "self") == count


# It writes the number of a child of its own that has ended, and does not wait for it.
NEGLECTFUL = """
import os, signal, sys, time
child = os.fork()
if child == 0:
    os._exit(7)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
print(child, flush=True)
sys.stdin.read()
"""


def test_a_rank_that_ended_before_anybody_looked_has_ended(tmp_path: Path) -> None:
    """It was taken for a process of somebody else, and so for one that hangs."""
    env = {**os.environ, RUN_TOKEN_VARIABLE: "ab12"}
    words = [sys.executable, "-c", NEGLECTFUL]
    with subprocess.Popen(
        words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        write_beats(tmp_path, 0, [record("step_start", step=3, pid=pid)])
        watch = RankWatch(tmp_path, "ab12", time.monotonic())
        watch.update()
        watch.wait(1.0)
        assert watch.ranks[0].ended
        assert watch.ranks[0].parent_saw == 7
        watch.close()
        parent.communicate()


PATH = {"PATH": os.environ["PATH"]}


def bare(run_dir: Path) -> int:
    """The pid of the daemon that a fake trainer started, told once it carried nothing of it."""
    note = run_dir / "bare.pid"
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        if note.exists() and note.read_text().endswith("\n"):
            return int(note.read_text())
        time.sleep(0.01)
    raise AssertionError("no daemon was started")


@pytest.mark.parametrize("victim", ["harness at once", "harness", "starter"])
def test_kill_9_leaves_no_process(tmp_path: Path, victim: str) -> None:
    """Starter, two ranks, grandchild, and a daemon without environment."""
    launch = fake_launch("--grandchild", "--bare", "--deaf", steps=100_000)
    started = harness(launch, tmp_path, budgets="default")
    run_dir = tmp_path / launch.run_dir
    heartbeats, daemon, pid = run_dir / "heartbeat_rank1.jsonl", 0, started.pid
    while not (run_dir / "launch.json").exists():
        time.sleep(0.01)
    if victim != "harness at once":
        daemon = bare(run_dir)
        while not heartbeats.exists() or b"step_end" not in heartbeats.read_bytes():
            time.sleep(0.01)
        assert alive(daemon)
    if victim == "starter":
        rank = int(json.loads(heartbeats.read_text().splitlines()[0])["pid"])
        pid = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)
    token = json.loads((run_dir / "launch.json").read_text())["run_token"]
    left = [one for one in (daemon, *carriers(token)) if one]
    assert [one for one in left if not gone(one, within_s=3.0)] == []
    started.wait(20)
    assert carriers(token) == []


def kept(
    tmp_path: Path, *command: str, variables: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    with (tmp_path / "console").open("wb") as output:
        return spawn_kept(command, PATH | (variables or {}), output=output, cwd=tmp_path)


@table(__file__, "ends_of_commands")
def test_the_subreaper_ends_as_its_command_did(
    tmp_path: Path, command: list[str], code: int, said: str
) -> None:
    (tmp_path / "mine.sh").write_text("#!/bin/sh\n")
    child = kept(tmp_path, *command)
    assert child.wait(10) == code
    end_kept(child)
    assert list(tmp_path.glob("core*")) == []
    assert said in (tmp_path / "console").read_text()


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
