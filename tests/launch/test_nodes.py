"""An agent on a node that does not find the first one."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from runbook.errors import RunbookError
from runbook.launch.nodes import agent, files
from runbook.launch.nodes.agent import Agent, Place


def test_a_name_that_nobody_knows_is_told_long_before_the_job_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the first node is there, and the cluster's name service fails."""
    asked: list[str] = []

    def unknown(name: str) -> str:
        asked.append(name)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(agent, "_NAMED_WITHIN_S", 0.3)
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    meeting = files.Rendezvous(address="first.jobs", port=29400)
    files.write_record(tmp_path / files.RENDEZVOUS_JSON, meeting)
    (tmp_path / files.NODES / "k1").mkdir(parents=True)
    job = files.Job(run_token="ab", nodes=2, nproc=2, argv=("x",), torchrun=True, meet_s=600)
    second = Place(node="k1", index=1, address="127.0.0.1", called="second.jobs")
    began = time.monotonic()
    with pytest.raises(RunbookError, match=r"the address of first\.jobs is not known"):
        Agent(tmp_path, job, second)._meet()
    assert set(asked) == {"first.jobs"} and len(asked) > 1
    assert time.monotonic() - began < 60
