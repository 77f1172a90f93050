"""How a process ended, by the kernel's own word."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from runbook.launch.processes import exit_code_of, oom_kills


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
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "self").write_text(membership)
    assert oom_kills(tmp_path, tmp_path / "self") == count


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
