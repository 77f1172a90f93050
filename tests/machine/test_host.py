"""Disk, memory, ports, InfiniBand, leftover processes: of this machine and of folders made here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from runbook.config.settings import environment_notes, environment_problems
from runbook.machine import host
from runbook.machine.host import Seen, find_trainers


def test_infiniband_ports_with_their_state(tmp_path: Path) -> None:
    for device, number, state, layer in (
        ("mlx5_0", "1", "4: ACTIVE", "InfiniBand"),
        ("mlx5_1", "1", "1: DOWN", "InfiniBand"),
        ("mlx5_2", "1", "4: ACTIVE", "Ethernet"),
    ):
        port = tmp_path / device / "ports" / number
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{layer}\n")
    assert host.find_infiniband(tmp_path) == {
        "mlx5_0/1": "ACTIVE",
        "mlx5_1/1": "DOWN",
        "mlx5_2/1": "ACTIVE Ethernet",
    }
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


SLEEP = "import time; print('up', flush=True); time.sleep(60)"


def test_a_whole_tree_belongs_to_whoever_started_its_top() -> None:
    tree = [
        Seen(pid=1, parent=0),
        Seen(pid=10, parent=1),  # a live harness
        Seen(pid=11, parent=10, token="aaaa"),  # its torchrun
        Seen(pid=12, parent=11, token="aaaa"),  # its rank
        Seen(pid=20, parent=1, token="bbbb"),  # torchrun of a harness that died
        Seen(pid=21, parent=20, token="bbbb"),
    ]
    found = {item.pid: item.orphan for item in find_trainers(tree)}
    assert found == {11: False, 12: False, 20: True, 21: True}


TRAINER = ("/v/bin/python", "-u", "-m", "nsa.train", "--config", "x.yaml")


def test_a_trainer_of_anybody_is_found_by_what_it_runs() -> None:
    """`ps aux | grep train_showcase` of the documents, without what only has the name."""
    tree = [
        Seen(pid=1, parent=0),
        Seen(pid=10, parent=1, words=("-bash",)),
        Seen(pid=11, parent=10, words=("torchrun", "--nproc_per_node=2", "-m", "nsa.train")),
        Seen(pid=12, parent=11, words=TRAINER),
        Seen(
            pid=20, parent=1, words=("/v/bin/python3.12", "/v/bin/torchrun", "a/train_showcase.py")
        ),
        Seen(pid=21, parent=20, words=("/v/bin/python3.12", "-u", "a/train_showcase.py")),
        Seen(pid=30, parent=1, words=("vim", "scripts/train_showcase.py")),
        Seen(pid=31, parent=1, words=("/v/bin/python", "-m", "nsa.data.smoke")),
        Seen(pid=32, parent=1, words=()),
    ]
    found = {item.pid: item.orphan for item in find_trainers(tree)}
    assert found == {11: False, 12: False, 20: True, 21: True}
    assert not find_trainers(tree[1:2] + tree[6:])
    assert [one.pid for one in find_trainers(tree[6:], trainer="nsa.data.smoke")] == [31]


def test_a_trainer_that_somebody_left_is_named_with_its_pid_and_left_alone() -> None:
    """A real process without a token, whose starter has gone; its own trainer only sleeps."""
    middle = (
        "import subprocess, sys;"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}, '-m', 'nsa.train'],"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True);"
        "print(child.pid)"
    )
    done = subprocess.run(
        [sys.executable, "-c", middle], capture_output=True, text=True, check=True
    )
    pid = int(done.stdout)
    try:
        (mine,) = [item for item in find_trainers() if item.pid == pid]
        assert mine.orphan and str(mine).startswith(f"pid {pid} left over: {sys.executable} -c ")
        assert psutil.pid_exists(pid)
    finally:
        os.kill(pid, 9)


def test_everything_wrong_with_the_environment_is_listed() -> None:
    problems = environment_problems(
        {
            "NSA_DDP_BUKET_MB": "50",
            "NSA_DDP_COMPRESS": "zip",
            "NSA_SDPA_FLASH_ONLY": "1",
            "NSA_SDPA_NO_FLASH": "1",
            "PYTORCH_CUDA_ALLOC_CONF": "a:1",
            "PYTORCH_ALLOC_CONF": "a:1",
            "TORCH_NCCL_HEARTBEAT_TIMEOUT": "9",
            "NCCL_ALG": "Ring",
        },
        uses_nccl=True,
    )
    text = "\n".join(problems)
    assert len(problems) == 6
    assert "NCCL_ALG: NCCL reads NCCL_ALGO" in text
    assert "NSA_DDP_BUKET_MB" in text and "NSA_DDP_BUCKET_MB" in text
    assert "off, bf16, fp16" in text
    assert "exclude each other" in text
    assert "alias" in text
    assert "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" in text


def test_variables_that_torch_renamed_get_a_note_each() -> None:
    notes = environment_notes(
        {"NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_ALGO": "Ring", "NCCL_LATER": "1"}, uses_nccl=True
    )
    assert len(notes) == 2
    assert notes["NCCL_ASYNC_ERROR_HANDLING"]
    assert notes["NCCL_LATER"].startswith("no name that NCCL 2.")
