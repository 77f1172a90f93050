"""A harness that is stopped for a while: what a launch did meanwhile is no fault of its trainer."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from runbook.accounts import clocks
from runbook.folder.launch.evidence import read_launch
from runbook.launch.launcher_api import Running, Start
from runbook.launch.local import Local, LocalRun
from runbook.launch.watch import Presence
from runbook.process.reaper import carriers
from runbook.records import Launch, LaunchResult
from tests.launch.helpers import fake_launch, harness, run

# Longer than a harness that looks ten times a second is ever late.
STOPPED_S = 8.0


def when(there: Path, text: str) -> None:
    """Wait until the file has the text."""
    until = time.monotonic() + 60
    while not there.is_file() or text not in there.read_text():
        assert time.monotonic() < until, f"{there} never has {text}"
        time.sleep(0.02)


def stopped(launch: Launch, root: Path, *, at: str, with_trainer: bool) -> LaunchResult:
    """Run it in a harness that is stopped once rank 0 has said `at`, alone or as a container is."""
    started = harness(launch, root)
    folder = root / launch.run_dir
    try:
        when(folder / "heartbeat_rank0.jsonl", at)
        token = json.loads((folder / "launch.json").read_text())["run_token"]
        trainer = carriers(token) if with_trainer else []
        send([started.pid, *trainer], signal.SIGSTOP)
        time.sleep(STOPPED_S)
        send([started.pid], signal.SIGCONT)
        time.sleep(0.5 if trainer else 0.0)  # on a busy machine the ranks wake up later
        send(trainer, signal.SIGCONT)
        assert started.wait(60) == 0
    finally:
        started.kill()
        started.wait()
    return LaunchResult.model_validate_json((folder / "result.json").read_text())


def send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def times_off(root: Path, launch: Launch, result: LaunchResult) -> list[str]:
    """What of the time of this launch does not balance by the clocks of ranks and launcher."""
    found = read_launch(root, launch, result)
    assert found.training is not None and len(found.ranks) == launch.nproc
    told = clocks.time_account(
        found.training.frame, found.ranks, result.duration_s, exits=result.ranks
    )
    return [text for text in told if "launch" in text or "(ts)" in text]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may lie beside the ranks' own time, here less than the stop."""
    monkeypatch.setattr(clocks, "OVERHEAD_S", STOPPED_S / 2)


def test_a_trainer_that_ended_while_the_harness_was_stopped(tmp_path: Path) -> None:
    launch = fake_launch("--dt", "0.1", steps=20)
    result = stopped(launch, tmp_path, at='"step": 8', with_trainer=False)
    assert result.ok, result.cause
    assert times_off(tmp_path, launch, result) == []
    assert all(STOPPED_S / 2 < one.away_s <= STOPPED_S + 1 for one in result.ranks)
    (note,) = result.notes
    assert "the harness itself stood still for " in note
    # The same times without a stop: then the trainer hides them.
    present = tuple(one.model_copy(update={"away_s": 0.0}) for one in result.ranks)
    hidden = times_off(tmp_path, launch, result.model_copy(update={"ranks": present}))
    assert len(hidden) == 2 and all(" s of a launch of " in text for text in hidden)


def test_what_stood_still_with_its_trainer_is_given_nothing(tmp_path: Path) -> None:
    """As in a container that is frozen beyond the launch's time: its ranks were silent for eight
    times their budget, and so was the watchdog.
    """
    launch = fake_launch("--dt", "0.1", steps=20, timeout_s=STOPPED_S)
    result = stopped(launch, tmp_path, at='"step": 8', with_trainer=True)
    assert result.ok, result.cause
    assert times_off(tmp_path, launch, result) == []
    assert [one.away_s for one in result.ranks] == [0.0, 0.0]


class Queue(Local):
    """Takes its time to begin, as a cluster does whose nodes are taken."""

    here = False

    def start(self, start: Start) -> Running:
        time.sleep(STOPPED_S / 2)
        return LocalRun(start)


def test_time_in_a_queue_is_no_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "OVERHEAD_S", STOPPED_S / 4)
    launch = fake_launch(steps=5)
    result = run(launch, tmp_path, launcher=Queue())
    assert result.ok, result.cause
    assert times_off(tmp_path, launch, result) == []
    assert all(STOPPED_S / 2 <= one.away_s < STOPPED_S / 2 + 1 for one in result.ranks)
    assert result.notes == ()


@pytest.mark.parametrize(
    ("passed_s", "computed_s", "away_s"),
    [(0.1, 0.1, 0.0), (5.0, 0.0, 0.0), (60.0, 0.5, 59.5), (60.0, 59.0, 0.0)],
)
def test_who_computes_is_there(
    monkeypatch: pytest.MonkeyPatch, passed_s: float, computed_s: float, away_s: float
) -> None:
    """A trainer that writes files over which the harness sits long makes it no less there."""
    now = {"monotonic": 1000.0, "process_time": 3.0}
    for name in now:
        monkeypatch.setattr(f"runbook.launch.watch.time.{name}", lambda name=name: now[name])
    presence = Presence()
    assert presence.look() == 0.0, "there is no look before the first"
    now["monotonic"] += passed_s
    now["process_time"] += computed_s
    assert (presence.look(), presence.away_s) == (away_s, away_s)
    assert (presence.look(), presence.away_s) == (0.0, away_s)
