"""How a process ended, by the kernel's own word."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nsa.contract import RUN_TOKEN_VARIABLE
from runbook.launch.watch import RankWatch
from runbook.process.ended import exit_code_of, group_tasks, has_ended_under, oom_kills
from runbook.process.reaper import environment_holds
from tests.factory.files import record, write_beats


def control_groups(root: Path, files: dict[str, str], membership: str) -> Path:
    """The kernel's files of control groups below root; returns the one that names a process's."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "self").write_text(membership)
    return root / "self"


@pytest.mark.parametrize(
    ("files", "membership", "count"),
    [
        ({"memory.events": "low 0\noom 2\noom_kill 3\n"}, "0::/\n", 3),
        ({"a/b/memory.events": "oom_kill 4\n", "memory.events": "oom_kill 9\n"}, "0::/a/b\n", 4),
        ({"memory/j/memory.oom_control": "under_oom 0\noom_kill 5\n"}, "4:memory:/j\n0::/\n", 5),
        ({"memory/memory.oom_control": "oom_kill 1\n"}, "4:memory:/elsewhere\n", 1),
        ({"memory.events": "nonsense"}, "0::/\n", None),
        ({}, "0::/\n", None),
    ],
)
def test_the_kernels_count_of_memory_kills(
    tmp_path: Path, files: dict[str, str], membership: str, count: int | None
) -> None:
    assert oom_kills(tmp_path, control_groups(tmp_path, files, membership)) == count


@pytest.mark.parametrize(
    ("files", "membership", "count"),
    [
        ({"pids.max": "300\n"}, "0::/\n", 300),
        ({"a/b/pids.max": "max\n", "a/pids.max": "90\n", "pids.max": "500\n"}, "0::/a/b\n", 90),
        ({"pids/j/pids.max": "64\n", "pids.max": "9\n"}, "8:pids:/j\n1:cpu:/\n", 64),
        ({"pids/pids.max": "33\n"}, "8:pids:/elsewhere\n", 33),
        ({"pids.max": "max\n"}, "0::/\n", None),
        ({}, "0::/\n", None),
    ],
)
def test_how_many_processes_a_group_may_have(
    tmp_path: Path, files: dict[str, str], membership: str, count: int | None
) -> None:
    assert group_tasks(tmp_path, control_groups(tmp_path, files, membership)) == count


@pytest.mark.parametrize(("act", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", -9)])
@pytest.mark.parametrize("waited_for", [False, True])
def test_how_a_process_ended_is_known_without_being_its_parent(
    act: str, code: int, waited_for: bool
) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"import os; {act}"])
    handle = os.pidfd_open(child.pid)
    try:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        assert poller.poll(10_000)
        if waited_for:
            child.wait()
        found = exit_code_of(child.pid, handle)
    finally:
        os.close(handle)
        child.wait()
    # Once its parent has waited for it, only kernels since 6.15 remember.
    assert found == code or (waited_for and found is None)


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


@contextmanager
def neglected(token: str) -> Iterator[tuple[int, int]]:
    """The pids of such a process with the token, and of its child."""
    env = {**os.environ, RUN_TOKEN_VARIABLE: token}
    with subprocess.Popen(
        [sys.executable, "-c", NEGLECTFUL], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        yield parent.pid, int(parent.stdout.readline())
        parent.stdin.close()


@contextmanager
def held(pid: int) -> Iterator[int]:
    """A pidfd."""
    handle = os.pidfd_open(pid)
    try:
        yield handle
    finally:
        os.close(handle)


@pytest.mark.parametrize(("token", "known"), [("ab12", True), ("cd34", False), ("", False)])
def test_a_process_that_ended_is_known_by_its_parent_until_that_has_waited(
    token: str, known: bool
) -> None:
    """It has no memory any more, and so no token of its own."""
    with neglected(token) as (parent, pid), held(pid) as handle, held(parent) as alive:
        assert not environment_holds(pid, "ab12")
        assert has_ended_under(pid, handle, "ab12") is known
        assert exit_code_of(pid, handle) == 7
        assert not has_ended_under(parent, alive, "ab12")


def test_a_rank_that_ended_before_anybody_looked_has_ended(tmp_path: Path) -> None:
    """It was taken for a process of somebody else, and so for one that hangs."""
    with neglected("ab12") as (_, pid):
        write_beats(tmp_path, 0, [record("step_start", step=3, pid=pid)])
        watch = RankWatch(tmp_path, "ab12", time.monotonic())
        watch.update()
        watch.wait(1.0)
        assert watch.ranks[0].ended
        assert watch.ranks[0].parent_saw == 7
        watch.close()
