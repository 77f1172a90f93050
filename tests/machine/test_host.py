"""Disk, memory, ports, InfiniBand, leftover processes: of this machine and of folders made here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from runbook.config.settings import environment_notes, environment_problems
from runbook.machine import host
from runbook.machine.host import Seen, find_trainers
from tests.factory.tables import rows, table


def test_infiniband_ports_with_their_state(tmp_path: Path) -> None:
    ports = rows(__file__, "infiniband")
    for told in ports:
        port = tmp_path / told["port"].replace("/", "/ports/")
        port.mkdir(parents=True)
        (port / "state").write_text(f"{told['state']}\n")
        (port / "link_layer").write_text(f"{told['layer']}\n")
    assert host.find_infiniband(tmp_path) == {told["port"]: told["is"] for told in ports}
    assert host.find_infiniband(tmp_path / "absent") == {}


def test_memory_is_that_of_the_container_if_less(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    whole = host.memory_total_gib(tmp_path)
    assert whole == host.memory_total_gib(tmp_path / "absent") > 0.25
    (tmp_path / "memory.max").write_text(f"{1024**3 // 4}\n")
    assert host.memory_total_gib(tmp_path) == 0.25


def test_write_speed_leaves_nothing_behind(tmp_path: Path) -> None:
    assert host.write_speed_mib_s(tmp_path, size_mib=2) > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError):
        host.write_speed_mib_s(tmp_path / "absent", size_mib=1)


def test_a_held_port_is_not_free_and_names_its_owner() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        number = holder.getsockname()[1]
        assert f"pid {os.getpid()}" in (host.port_holder(number) or "")
    assert host.port_holder(number) is None


@table(__file__, "trees")
def test_a_trainer_of_anybody_is_found_by_what_it_runs(
    why: str, tree: list[dict[str, Any]], more: dict[str, str], orphans: dict[int, bool]
) -> None:
    """`ps aux | grep train_showcase` of the documents, without what only has the name."""
    seen = [Seen(**{**one, "words": tuple(one.get("words", "").split())}) for one in tree]
    assert {item.pid: item.orphan for item in find_trainers(seen, **more)} == orphans, why


def test_a_trainer_that_somebody_left_is_named_with_its_pid_and_left_alone() -> None:
    """A real process without a token, whose starter has gone; its own trainer only sleeps."""
    sleeps = f"{sys.executable} -c 'import time; time.sleep(60)' -m nsa.train"
    line = ["sh", "-c", f"setsid {sleeps} >&- 2>&- & echo $!"]
    pid = int(subprocess.check_output(line, text=True))
    try:
        (mine,) = [item for item in find_trainers() if item.pid == pid]
        assert mine.orphan and str(mine).startswith(f"pid {pid} left over: {sys.executable} -c ")
        assert psutil.pid_exists(pid)
    finally:
        os.kill(pid, 9)


def test_everything_wrong_with_the_environment_is_listed() -> None:
    wrong = rows(__file__, "wrong_variables")
    problems = environment_problems(
        {name: value for row in wrong for name, value in row["set"].items()}, uses_nccl=True
    )
    assert len(problems) == len(wrong)
    assert [row for row in wrong if row["said"] not in "\n".join(problems)] == []


def test_variables_that_torch_renamed_get_a_note_each() -> None:
    notes = environment_notes(
        {"NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_ALGO": "Ring", "NCCL_LATER": "1"}, uses_nccl=True
    )
    assert len(notes) == 2
    assert notes["NCCL_ASYNC_ERROR_HANDLING"]
    assert notes["NCCL_LATER"].startswith("no name that NCCL 2.")
