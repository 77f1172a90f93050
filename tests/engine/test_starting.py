"""What is started and what is not, from which checkpoint, and how a run that was ended goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from nsa.contract import CHECKSUMS_JSON, METADATA_FILE, shard_file
from nsa.contract.digests import identity_of, sha256_of
from runbook.config import PlanNote
from runbook.config.registry import PlanContext
from runbook.config.setup import Setup
from runbook.engine.derive import render
from runbook.engine.resuming import resume_run
from runbook.engine.run import run_setup
from runbook.engine.starting import PREEMPTION, begin_at, known_end
from runbook.errors import RunbookError, UsageError
from runbook.launch.observer import Observer
from runbook.records import (
    Launch,
    LaunchEntry,
    LaunchResult,
    LaunchStatus,
    RankExit,
    RunRecord,
    Verdict,
)
from tests.cli.shell import environment
from tests.engine import toys
from tests.engine.test_interrupt_and_resume import digests, wait_for
from tests.engine.toys import Toy, resume, run, setups_by
from tests.factory.files import record, write_beats
from tests.launch.helpers import fake_launch

NAN = LaunchStatus.NON_FINITE
CRASHED = LaunchStatus.CRASHED


def setup(out: Path, *phases: Toy, **changed: Any) -> Setup:
    """A plan of these phases, which stops at the first NO-GO."""
    asked = toys.setup(out, *phases, **changed)
    names = tuple(phase.name for phase in phases)
    note = PlanNote(name="toy", shipped=False, stops=True, phases=names)
    return replace(asked, profile=asked.profile.model_copy(update={"plan": note}))


def three(second: Toy) -> tuple[Toy, ...]:
    return (Toy("baseline"), second, Toy("long_run"))


def started(record: RunRecord, phase: str) -> int:
    found = next(one for one in record.phases if one.name == phase)
    return sum(entry.result.attempts for entry in found.launches)


@pytest.mark.parametrize("keep_going", [False, True])
def test_the_first_no_go_stops_the_plan_and_a_finding_ends_it(
    tmp_path: Path, keep_going: bool
) -> None:
    ill = Toy("bucket_sweep", words=("--fault", "nan"))
    asked = setup(tmp_path, *three(ill), keep_going=keep_going)
    record = run_setup(asked, observer=Observer())
    assert record.verdict is Verdict.NO_GO
    assert (started(record, "baseline"), started(record, "long_run")) == (1, 0)
    _, found, left = (phase.launches[0].result for phase in record.phases)
    assert (found.status, left.follows) == (NAN, "bucket_sweep.completed")
    assert "--keep-going" not in left.cause
    with setups_by(lambda _: asked), pytest.raises(UsageError, match="is finished: NO-GO"):
        resume_run(tmp_path / record.run_id, observer=Observer())


class _Legs(Toy):
    """Two launches, of which the second ends badly with these words."""

    def __init__(self, *words: str) -> None:
        super().__init__("bucket_sweep", count=2)
        self.second = words

    def plan(self, context: PlanContext) -> list[Launch]:
        first, second = super().plan(context)
        return [first, second.model_copy(update={"argv": (*second.argv, *self.second)})]


def test_a_plan_goes_on_after_a_crash_with_what_had_not_finished(tmp_path: Path) -> None:
    crashed, whole = _Legs("--fault", "exit7"), _Legs()
    record = run_setup(setup(tmp_path, *three(crashed)), observer=Observer())
    run = tmp_path / record.run_id
    assert record.verdict is Verdict.NO_GO
    kept = digests(run / "bucket_sweep/run1")

    def make(_: RunRecord) -> Setup:
        return setup(tmp_path, *three(whole))

    with setups_by(make):
        again = resume_run(run, observer=Observer())
    assert again.verdict is Verdict.GO, again.reasons
    assert digests(run / "bucket_sweep/run1") == kept, "what had finished is not repeated"
    assert (run / "bucket_sweep/run2.repeated1/result.json").is_file(), "the crash is kept"
    assert any("REPEATED (bucket_sweep after FAIL" in text for text in again.caveats)
    assert started(again, "long_run") == 1, "and the plan goes on behind it"
    with setups_by(make), pytest.raises(UsageError, match="is finished: GO"):
        resume_run(run, observer=Observer())


def test_a_launch_that_needed_a_second_attempt_is_in_the_first_line_and_in_junit(
    tmp_path: Path,
) -> None:
    """The collective library fails once; without this, the run looked like any healthy one."""
    words = ("--fault", "nccl", "--once", str(tmp_path / "once"))
    made, _ = run(tmp_path / "out", Toy("baseline", words=words), Toy("nvtx"), retry=True)
    assert made.verdict is Verdict.GO, "a toy has no limit for it"
    assert [phase.flaky for phase in made.phases] == [("run1",), ()]
    assert "FLAKY (baseline/run1 needed a second attempt)" in made.headline
    for name in ("terminal", "md", "html"):
        assert "FLAKY (baseline/run1" in render(made, name)
    suites = {suite.get("name"): suite for suite in ElementTree.fromstring(render(made, "junit"))}
    found = suites["baseline"].find("properties/property[@name='flaky']")
    assert found is not None and found.get("value") == "run1"


@pytest.mark.parametrize(("fault", "started"), [("config", 1), ("nan", 1), ("", 3)])
def test_a_deterministic_end_is_not_repeated(tmp_path: Path, fault: str, started: int) -> None:
    words = ("--fault", fault) if fault else ()
    made, folder = run(tmp_path, Toy("baseline", count=3, words=words))
    results = [entry.result for entry in made.phases[0].launches]
    assert [result.attempts for result in results] == [1] * started + [0] * (3 - started)
    assert len(list((folder / "baseline").iterdir())) == started
    if fault == "config":
        assert results[0].status is LaunchStatus.CONFIG_ERROR
        assert results[2].status is LaunchStatus.NOT_RUN
        assert results[2].cause == f"run1 was refused: {results[0].cause}"
    elif fault:
        assert {result.status for result in results[1:]} == {LaunchStatus.NOT_RUN}
        assert {result.follows for result in results[1:]} == {"baseline/run1"}
        assert results[2].cause.startswith("run1 is the same command and ended badly (")


def ended(
    status: LaunchStatus, cause: str, *words: str, signal: str = "", name: str = "fake"
) -> LaunchEntry:
    ranks = (RankExit(rank=0, code=-9, signal=signal),) if signal else ()
    result = LaunchResult(status=status, cause=cause, culprit_rank=0, ranks=ranks)
    return LaunchEntry(launch=fake_launch(*words, name=name), result=result)


def killed(rank: int) -> LaunchEntry:
    return ended(CRASHED, f"rank {rank} was ended by SIGSEGV", signal="SIGSEGV")


@pytest.mark.parametrize(
    ("entries", "cause"),
    [
        ([ended(NAN, "NaN at step 3", "--dt", "9")], ""),
        ([killed(0)], ""),
        ([killed(0), killed(1)], "a rank was ended by SIGSEGV"),
        ([ended(LaunchStatus.HUNG, "x")], ""),
        ([ended(LaunchStatus.TIMED_OUT, "x"), ended(LaunchStatus.TIMED_OUT, "x")], ""),
        ([ended(LaunchStatus.CONFIG_ERROR, "x", "--dt", "9")], ""),
        ([ended(LaunchStatus.COMPLETED, "", name="leg1")], ""),
        ([ended(LaunchStatus.TIMED_OUT, "", name="leg1")], "goes on from leg1"),
    ],
)
def test_whatever_may_end_otherwise_is_started(entries: list[LaunchEntry], cause: str) -> None:
    again = fake_launch(name="leg2").model_copy(update={"resumes": "leg1", "after": 5})
    found = known_end(again if entries[0].launch.name == "leg1" else fake_launch(), entries)
    assert found is None if not cause else found is not None and cause in found.cause


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


@pytest.mark.slow
def test_a_command_that_is_ended_in_time_says_how_it_goes_on(tmp_path: Path) -> None:
    words = ("run", "--profile", "cpu", "--phase", "preflight", "--out", "runs")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "runbook", *words]
    cut = subprocess.Popen(command, cwd=tmp_path, env=environment(), text=True, **pipes)
    wait_for(tmp_path, "runs/*/preflight/*")
    cut.send_signal(signal.SIGTERM)  # as `timeout` does
    out, err = cut.communicate(timeout=60)
    assert cut.returncode == 143, err
    # Every row would say that it has no evidence: only the way to go on is told.
    first, resume, fingerprint, *reports = out.splitlines()
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
    told = {"path": f"checkpoints/step_{step}", "sha256": identity_of(made), "seconds": 0.5}
    write_beats(folder, 0, [record("checkpoint", step=step, **told)])
    return made


def written(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    for name in (METADATA_FILE, SHARD):
        (folder / name).write_text(text)
    sums = {name: sha256_of(folder / name) for name in (METADATA_FILE, SHARD)}
    (folder / CHECKSUMS_JSON).write_text(json.dumps({"step": 1, "sha256": sums}))
    return folder


def begun_at(root: Path, number: int = 3) -> str:
    begun = begin_at(root, leg(number))
    assert begun is not None and begun.path.endswith(f"/step_{begun.step}")
    return begun.path.removeprefix("production/").replace("/checkpoints/step_", " ")


def test_instead_of_a_damaged_one_the_newest_that_is_left(tmp_path: Path) -> None:
    checkpoint(tmp_path, "leg1", 50)
    second = checkpoint(tmp_path, "leg2", 100)
    saved = checkpoint(tmp_path, "leg3.unfinished1", 107)
    assert (begun_at(tmp_path, 2), begun_at(tmp_path)) == ("leg1 50", "leg2 100")
    (second / SHARD).write_text("weightz")
    assert begun_at(tmp_path) == "leg3.unfinished1 107"
    refused = f"production/leg2/checkpoints/step_100: {SHARD} differs from its sha256"
    begun = begin_at(tmp_path, leg(3))
    assert begun is not None and begun.refused == (refused,)
    (saved / SHARD).unlink()
    assert begun_at(tmp_path) == "leg1 50"


def test_a_checkpoint_of_another_run_is_not_used(tmp_path: Path) -> None:
    (checkpoint(tmp_path, "leg2", 100)).rename(tmp_path / "mine")
    written(tmp_path / "production/leg2/checkpoints/step_100", "another seed's")
    with pytest.raises(RunbookError, match="leg2/checkpoints/step_100: is not the checkpoint that"):
        begin_at(tmp_path, leg(3))
    checkpoint(tmp_path, "leg1", 50)
    assert begun_at(tmp_path) == "leg1 50"
