"""A run in parts: each ends within its time, and the parts together are the one run."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from runbook.engine.run import run_setup
from runbook.engine.starting import PREEMPTION, TIME_LIMIT, Part
from runbook.folder.journal import read_events
from runbook.folder.manifest import check_manifest
from runbook.launch import StopRequest
from runbook.launch.observer import Observer
from runbook.process.reaper import carriers
from runbook.records import Launch, LaunchEntry, LaunchResult, LaunchStatus, RunRecord, Verdict
from tests.cli.shell import runbook
from tests.engine.test_interrupt_and_resume import tokens
from tests.engine.toys import Toy, resume, run, setup
from tests.launch.helpers import fake_launch
from tests.shared import crowded


def entry(seconds: float, *, steps: int = 5, ok: bool = True) -> LaunchEntry:
    status = LaunchStatus.COMPLETED if ok else LaunchStatus.HUNG
    result = LaunchResult(status=status, duration_s=seconds)
    return LaunchEntry(launch=fake_launch(name="run1", steps=steps), result=result)


def launch() -> Launch:
    return fake_launch(name="run2", steps=5)


@pytest.mark.parametrize(
    ("entries", "typical_s", "starts"),
    [
        ([], None, True),  # nothing is known: it is tried
        ([entry(50)], None, True),
        ([entry(50), entry(200)], None, False),  # the longest counts
        ([entry(200, ok=False)], None, True),  # a hang says nothing about a healthy launch
        ([entry(200, steps=50)], None, True),  # nor does a launch of other length
        ([], 200.0, False),
        ([entry(50)], 200.0, True),  # what was seen here outranks the profile's guess
    ],
)
def test_a_launch_that_would_be_cut_off_is_left_to_the_next_part(
    entries: list[LaunchEntry], typical_s: float | None, starts: bool
) -> None:
    part = Part(limit_s=100.0, started_any=True)
    assert part.has_time_for(launch(), entries, typical_s) is starts


def test_a_part_that_ended_in_time_asks_nobody_to_stop() -> None:
    stop = StopRequest()
    with Part(limit_s=0.1).ends(stop):
        pass
    time.sleep(0.3)
    assert stop.requested == ""


def test_parts_of_one_run(tmp_path: Path) -> None:
    """The limit falls into a launch that is slow: it is cut off, and all goes on in part two."""
    slow = Toy("baseline", count=2, words=("--dt", "0.3"), steps=8)
    last = Toy("bucket_sweep")
    first = run_setup(setup(tmp_path, slow, last), observer=Observer(), until_s=5.0)
    folder = next(tmp_path.glob("*/run.json")).parent
    assert (first.verdict, first.interrupted) == (Verdict.INCOMPLETE, True)
    assert first.options["signal"] == TIME_LIMIT
    assert first.reasons[0] == f"interrupted by {TIME_LIMIT}"
    assert not any(carriers(token) for token in tokens(folder))
    assert check_manifest(folder) == []
    done = [e.launch.name for e in first.phases[0].launches if e.result.ok]
    for _ in range(4):
        record = resume(folder, slow, last, until_s=crowded(5.0))
        if not record.interrupted:
            break
    assert record.verdict is Verdict.GO
    assert RunRecord.model_validate_json((folder / "run.json").read_text()) == record
    events, _ = read_events(folder / "events.jsonl")
    begun = [e for e in events if e["event"] == "launch_started" and e["phase"] == "baseline"]
    started = [event["launch"] for event in begun]
    assert all(started.count(name) == 1 for name in done)
    assert check_manifest(folder) == []


def preempt(folder: Path) -> None:
    """SIGTERM to the first rank that ends a step, as who wants its machine sends it."""
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        for path in folder.glob("*/baseline/run1/heartbeat_rank0.jsonl"):
            if '"step_end"' in (text := path.read_text()):
                os.kill(json.loads(text.partition("\n")[0])["pid"], signal.SIGTERM)
                return
        time.sleep(0.02)


def test_a_run_whose_trainer_is_pre_empted_stops_and_goes_on(tmp_path: Path) -> None:
    slow, last = Toy("baseline", words=("--dt", "0.2"), steps=8), Toy("bucket_sweep")
    threading.Thread(target=preempt, args=(tmp_path,)).start()
    first, folder = run(tmp_path, slow, last)
    assert first.verdict is Verdict.INCOMPLETE and first.interrupted
    assert first.reasons[0] == f"interrupted by {PREEMPTION}"
    (cut,) = first.phases[0].launches
    assert cut.result.status is LaunchStatus.PREEMPTED
    assert not (folder / "bucket_sweep").exists(), "the machine is left to whoever wants it"
    record = resume(folder, slow, last)
    assert record.verdict is Verdict.GO, record.reasons
    assert (folder / "baseline/run1.unfinished1/heartbeat_rank0.jsonl").is_file()


def test_a_part_of_the_command_ends_with_3_and_says_how_it_goes_on(tmp_path: Path) -> None:
    words = ("run", "--profile", "cpu", "--phase", "preflight", "--out", "runs")
    cut = runbook(*words, "--until-s", "0.5", cwd=tmp_path)
    assert cut.code == 3 and "resume  runbook run --resume " in cut.out, cut.err
