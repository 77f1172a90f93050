"""Signals reach who carries the token of a run, and nobody else."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from runbook.process.reaper import carriers, environment_holds, kill_all, signal_owned


@pytest.fixture
def bystander() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["sleep", "30"], env={"RUNBOOK_RUN_TOKEN": "other", "PATH": "/bin:/usr/bin"}
    )


def test_a_signal_reaches_only_who_carries_the_token(bystander: subprocess.Popen[bytes]) -> None:
    while not environment_holds(bystander.pid, "other"):
        time.sleep(0.01)
    assert not signal_owned(bystander.pid, "mine", signal.SIGKILL)
    assert kill_all("mine") == []
    assert bystander.poll() is None
    assert carriers("other") == [bystander.pid]
    assert not environment_holds(bystander.pid, "othe")
    assert signal_owned(bystander.pid, "other", signal.SIGKILL)
    assert bystander.wait() == -9
    assert not signal_owned(bystander.pid, "other", signal.SIGKILL)
