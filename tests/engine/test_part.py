"""A run in parts: each ends in time, a leg begins at a checkpoint, and all are the one run."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from nsa.contract import CHECKSUMS_JSON, METADATA_FILE, shard_file
from nsa.contract.digests import identity_of, sha256_of
from runbook.engine.run import run_setup
from runbook.engine.starting import PREEMPTION, TIME_LIMIT, Part, begin_at
from runbook.errors import RunbookError
from runbook.folder.journal import read_events
from runbook.folder.manifest import check_manifest
from runbook.launch.observer import Observer
from runbook.process.reaper import carriers
from runbook.records import Launch, LaunchEntry, LaunchResult, LaunchStatus, Verdict
from tests.cli.shell import runbook
from tests.engine.test_interrupt_and_resume import tokens
from tests.engine.toys import Toy, resume, run, setup
from tests.launch.helpers import fake_launch
from tests.shared import crowded


def entry(seconds: float, *, steps: int = 5, ok: bool = True) -> LaunchEntry:
    status = LaunchStatus.COMPLETED if ok else LaunchStatus.HUNG
    result = LaunchResult(status=status, duration_s=seconds)
    return LaunchEntry(launch=fake_launch(name="run1", steps=steps), result=result)


@pytest.mark.parametrize(
    ("entries", "typical_s", "starts"),
    [
        ([], None, True),  # nothing is known: it is tried
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
    assert part.has_time_for(fake_launch(name="run2", steps=5), entries, typical_s) is starts


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
    done = [e.launch.name for e in first.phases[0].launches if e.result.ok]
    for _ in range(4):
        record = resume(folder, slow, last, until_s=crowded(5.0))
        if not record.interrupted:
            break
    assert record.verdict is Verdict.GO
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
    assert cut.code == 3, cut.err
    # Every row would say that it has no evidence: only the way to go on is told.
    first, resume, fingerprint, *reports = cut.out.splitlines()
    assert first.startswith("INCOMPLETE (") and resume.startswith("resume  runbook run --resume ")
    assert fingerprint.startswith("fingerprint  ")
    assert all(one.startswith("report  runs/") for one in reports)


SHARD = shard_file(0)


def leg(number: int) -> Launch:
    launch = fake_launch(name=f"leg{number}", steps=50 * number)
    change = {"phase": "production", "resumes": f"leg{number - 1}", "after": 50 * (number - 1)}
    return launch.model_copy(update=change)


def checkpoint(root: Path, launch: str, step: int) -> Path:
    """A launch that wrote a checkpoint of this step, and said so in its heartbeats."""
    folder = root / "production" / launch
    made = written(folder / "checkpoints" / f"step_{step}", "weights")
    beat = {
        "schema_version": 1, "event": "checkpoint", "rank": 0, "pid": 7, "run_token": "ab" * 8,
        "ts": 1.0, "mono": 1.0, "step": step, "phase": "checkpoint", "seconds": 0.5,
        "path": f"checkpoints/step_{step}", "sha256": identity_of(made),
    }  # fmt: skip
    (folder / "heartbeat_rank0.jsonl").write_text(json.dumps(beat) + "\n")
    return made


def written(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    for name in (METADATA_FILE, SHARD):
        (folder / name).write_text(text)
    sums = {name: sha256_of(folder / name) for name in (METADATA_FILE, SHARD)}
    (folder / CHECKSUMS_JSON).write_text(json.dumps({"step": 1, "sha256": sums}))
    return folder


def found(root: Path, number: int = 3) -> tuple[str, int]:
    begun = begin_at(root, leg(number))
    assert begun is not None
    return begun.path, begun.step


def test_a_leg_begins_at_the_end_of_the_one_before_it(tmp_path: Path) -> None:
    checkpoint(tmp_path, "leg1", 50)
    checkpoint(tmp_path, "leg2", 100)
    checkpoint(tmp_path, "leg3.unfinished1", 107)
    assert found(tmp_path) == ("production/leg2/checkpoints/step_100", 100)
    assert found(tmp_path, 2) == ("production/leg1/checkpoints/step_50", 50)


def test_instead_of_a_damaged_one_the_newest_that_is_left(tmp_path: Path) -> None:
    checkpoint(tmp_path, "leg1", 50)
    (checkpoint(tmp_path, "leg2", 100) / SHARD).write_text("weightz")
    saved = checkpoint(tmp_path, "leg3.unfinished1", 107)
    begun = begin_at(tmp_path, leg(3))
    assert begun is not None and begun.step == 107
    assert begun.path == "production/leg3.unfinished1/checkpoints/step_107"
    assert begun.refused == (
        f"production/leg2/checkpoints/step_100: {SHARD} differs from its sha256",
    )
    (saved / SHARD).unlink()
    assert found(tmp_path) == ("production/leg1/checkpoints/step_50", 50)


def test_a_checkpoint_of_another_run_is_not_used(tmp_path: Path) -> None:
    (checkpoint(tmp_path, "leg2", 100)).rename(tmp_path / "mine")
    written(tmp_path / "production/leg2/checkpoints/step_100", "another seed's")
    with pytest.raises(RunbookError, match="leg2/checkpoints/step_100: is not the checkpoint that"):
        begin_at(tmp_path, leg(3))
    checkpoint(tmp_path, "leg1", 50)
    assert found(tmp_path) == ("production/leg1/checkpoints/step_50", 50)
