"""Signals and sudden death, and a run that goes on: nothing left, repeated unseen or hidden."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from nsa.contract.digests import sha256_of
from runbook.config.registry import Judgement, PlanContext
from runbook.engine.derive import derive_record
from runbook.engine.starting import keep_aside, left_open, repeat
from runbook.errors import RunbookError, UsageError
from runbook.folder import EVENTS_FILE, MANIFEST_FILE, Journal, read_events, run_folders
from runbook.folder.manifest import (
    artifact_records,
    fingerprint_of,
    folder_problems,
    load_record,
    write_manifest,
)
from runbook.machine.identity import identity
from runbook.process import carriers
from runbook.records import Outcome, Reason, Verdict
from runbook.records.evidence import PhaseEvidence
from tests.cli.shell import inside
from tests.engine.toys import PHASES, Toy, resume, run, three_launches, verify
from tests.shared import crowded
from tests.tiers import by_tier

ROOT = Path(__file__).parents[2]


def start(out: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.engine.toys", *(words or ("run", str(out)))]
    # Under nohup the tests themselves ignore SIGHUP, and what they start would, too.
    hear = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=ROOT, preexec_fn=hear)


def tokens(out: Path) -> list[str]:
    return [json.loads(path.read_text())["run_token"] for path in out.rglob("launch.json")]


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}


def wait_for(out: Path, pattern: str) -> Path:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for path in out.glob(pattern):
            return path
        time.sleep(0.01)
    raise AssertionError(f"no {pattern} in {out}")


def assert_nothing_left(out: Path, within_s: float = 3.0) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and any(carriers(token) for token in tokens(out)):
        time.sleep(0.02)
    assert [pid for token in tokens(out) for pid in carriers(token)] == []


@pytest.mark.parametrize("name", by_tier(["SIGINT", "SIGTERM", "SIGHUP"], "SIGTERM".__eq__))
def test_a_signal_leaves_a_readable_report_and_no_process_and_the_run_is_continued(
    tmp_path: Path, name: str
) -> None:
    number = signal.Signals[name]
    harness = start(tmp_path)
    beats = wait_for(tmp_path, "*/bucket_sweep/run2/heartbeat_rank0.jsonl")
    folder = beats.parents[2]
    began = time.monotonic()
    harness.send_signal(number)
    assert harness.wait(timeout=120) == 128 + number
    assert time.monotonic() - began < crowded(5)
    assert_nothing_left(tmp_path, within_s=0.1)
    record = load_record(folder)
    assert record.interrupted and record.verdict is Verdict.INCOMPLETE
    assert record.reasons[0] == f"interrupted by {number.name}"
    assert number.name in (folder / "report.md").read_text()
    assert record.phases[0].outcome is Outcome.PASS
    statuses = [entry.result.status for entry in record.phases[1].launches]
    assert statuses == ["completed", "interrupted"]
    assert verify(folder, *three_launches()).differences == ()
    before = digests(folder)
    assert start(tmp_path, "resume", str(folder)).wait(timeout=300) == 0
    after = digests(folder)
    kept = [name for name in before if name.startswith(("baseline/", "bucket_sweep/run1/"))]
    assert len(kept) > 10
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    record = load_record(folder)
    assert (record.verdict, record.interrupted) == (Verdict.GO, False)
    assert "signal" not in record.options
    assert (folder / "bucket_sweep/run2.unfinished1").is_dir()
    assert folder_problems(folder, load_record(folder)) == []


@pytest.mark.parametrize("moment", ["engine.run.keep_configs", "cli.run.observers.print_summary"])
def test_a_signal_before_the_first_phase_or_after_the_last_is_no_sudden_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The folder is there, and its record not yet; or the run is over, and its verdict not told."""
    real = importlib.import_module(f"runbook.{moment.rpartition('.')[0]}")
    name = moment.rpartition(".")[2]
    before = getattr(real, name)

    def signalled(*words: object, **named: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return before(*words, **named)

    monkeypatch.setattr(real, name, signalled)
    ended = inside("run", "--phase", "v2_parity", "-p", "cpu", "--out", "runs", cwd=tmp_path)
    (folder,) = run_folders(tmp_path / "runs")
    record = load_record(folder)
    assert f"fingerprint  {fingerprint_of(record)[:32]}" in ended.out
    if name == "print_summary":
        assert (ended.code, record.verdict) == (4, Verdict.PARTIAL)
        return
    assert (ended.code, record.reasons[0]) == (128 + signal.SIGTERM, "interrupted by SIGTERM")
    assert record.launches() == () and f"run --resume {folder.name}" in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kill_9_at_a_random_time_leaves_nothing_and_is_continued(tmp_path: Path, seed: int) -> None:
    harness = start(tmp_path)
    folder = wait_for(tmp_path, "*/baseline/run1/launch.json").parents[2]
    time.sleep(random.Random(seed).uniform(0.0, 2.5))
    os.kill(harness.pid, signal.SIGKILL)
    harness.wait()
    assert_nothing_left(tmp_path)
    events, _ = read_events(folder / "events.jsonl")
    finished = [event for event in events if event["event"] == "phase_finished"]
    before = digests(folder)
    if any(event["event"] == "run_finished" for event in events):
        return  # the plan was quicker than the axe
    assert start(tmp_path, "resume", str(folder)).wait(timeout=120) == 0
    record = load_record(folder)
    assert record.verdict is Verdict.GO
    after = digests(folder)
    for event in finished:
        name = event["record"]["name"]
        files = [path for path in before if path.startswith(f"{name}/")]
        assert {path: after[path] for path in files} == {path: before[path] for path in files}
        kept = next(phase for phase in record.phases if phase.name == name)
        assert kept.model_dump(mode="json") == event["record"]


def cut_after(folder: Path, event: str) -> None:
    """What a crash right after this event leaves of the journal."""
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    index = next(i for i, line in enumerate(lines) if f'"event":"{event}"' in line)
    path.write_text("".join(lines[: index + 1]))
    (folder / MANIFEST_FILE).unlink(missing_ok=True)


def test_a_launch_that_was_stopped_and_begun_again_is_told_beside_the_verdict(
    tmp_path: Path,
) -> None:
    """Whoever watches could stop a slow launch, and go on until one is fast."""
    phase = Toy("baseline", count=2)
    first, folder = run(tmp_path, phase)
    assert "CUT OFF" not in first.headline
    cut_after(folder, "launch_started")
    record = resume(folder, phase)
    assert record.verdict is Verdict.GO
    assert "CUT OFF (baseline/run1 begun 2 times)" in record.headline
    assert verify(folder, phase).differences == ()


def test_a_run_that_ended_while_its_reports_were_written_is_closed(folder: Path) -> None:
    """Killed there, or on a full disk: nothing runs again."""
    first, before = load_record(folder), digests(folder)
    for gone in (("MANIFEST.sha256",), ("MANIFEST.sha256", "report.md", "run.json")):
        for name in gone:
            (folder / name).unlink()
        assert resume(folder, *PHASES.values()) == first
        assert digests(folder) == before
        assert folder_problems(folder, load_record(folder)) == []


@pytest.mark.parametrize(
    ("how", "said"),
    [("interrupted", "changed .sha256"), ("killed", "differs from its digest in events.jsonl")],
)
def test_evidence_that_was_edited_between_two_parts_of_a_run_is_not_taken(
    folder: Path, how: str, said: str
) -> None:
    """A phase that is judged again would be judged by it, and nothing would differ afterwards."""
    cut_after(folder, "phase_finished")
    if how == "interrupted":
        with Journal.reopen(folder) as journal:
            listed = artifact_records(folder, without=["run.json", "events.jsonl", "report.md"])
            artifacts = [one.model_dump(mode="json") for one in listed]
            journal.append("run_interrupted", signal="SIGINT", artifacts=artifacts)
    log = folder / "baseline/run1/training.csv"
    log.write_text(log.read_text().replace("0", "1"))
    with pytest.raises(UsageError, match=f"run1/training[.]csv: {said}"):
        resume(folder, *PHASES.values())


def test_what_a_launch_wrote_that_began_anew_is_not_held_against_its_first_attempt(
    tmp_path: Path,
) -> None:
    """Pre-empted, judged, begun again and killed: its log is another one, and nobody edited it."""
    _, folder = run(tmp_path, Toy("baseline"))
    finished = {event["event"]: event for event in read_events(folder / EVENTS_FILE)[0]}
    cut_after(folder, "launch_started")
    with Journal.reopen(folder) as journal:
        for name, changed in (
            ("launch_finished", {"result": {"status": "preempted"}}),
            ("phase_finished", {"interrupted": True}),
            ("launch_started", {}),
        ):
            event = {k: v for k, v in finished[name].items() if k not in ("seq", "ts", "event")}
            for key, value in changed.items():
                event[key] = {**event[key], **value} if isinstance(value, dict) else value
            journal.append(name, **event)
    log = folder / "baseline/run1/training.csv"
    log.write_text(log.read_text().replace("0", "1"))
    assert resume(folder, Toy("baseline")).verdict is Verdict.GO


def test_half_an_event_is_cut_off_before_more_is_written(tmp_path: Path) -> None:
    with Journal.create(tmp_path) as journal:
        journal.append("one")
        journal.append("two")
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    with Journal.reopen(tmp_path) as journal:
        journal.append("three")
    assert [event["event"] for event in read_events(path)[0]] == ["one", "three"]


@pytest.mark.parametrize("edit", ["removed", "changed", "nonsense", "key twice", "CR"])
def test_a_journal_that_was_edited_is_refused(tmp_path: Path, edit: str) -> None:
    with Journal.create(tmp_path) as journal:
        for name in ("one", "two", "three"):
            journal.append(name)
    path = tmp_path / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    twice = lines[1].replace('"event":', '"event":"x","event":')
    carriage = lines[1].replace("\n", "\r\n")
    edits = {"removed": "", "changed": lines[0], "nonsense": "{\n", "key twice": twice}
    lines[1] = {**edits, "CR": carriage}[edit]
    path.write_text("".join(lines), newline="")
    with pytest.raises(RunbookError, match="line 2 is damaged or out of order"):
        read_events(path)


def test_what_cannot_be_continued_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        resume(tmp_path)
    path = folder / "events.jsonl"
    path.write_text(path.read_text().replace('"tool_version":"', '"tool_version":"9.'))
    cut_after(folder, "phase_finished")
    with pytest.raises(UsageError, match=r"made by version 9\."):
        resume(folder, *PHASES.values())


def test_a_signal_during_a_judgement_is_a_row(tmp_path: Path) -> None:
    class Slow(Toy):
        def judge(self, evidence: PhaseEvidence, context: PlanContext) -> Judgement:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
            raise AssertionError("not interrupted")

    began = time.monotonic()
    record, folder = run(tmp_path, Slow("baseline"))
    assert time.monotonic() - began < crowded(5)
    assert record.interrupted
    assert {check.code for check in record.checks()} == {Reason.INTERRUPTED}
    # Once interrupted, the launch need not be run again: only the judgement is missing.
    assert resume(folder, Toy("baseline")).verdict is Verdict.GO
    events, _ = read_events(folder / "events.jsonl")
    assert [e["event"] for e in events].count("launch_started") == 1


def test_a_phase_is_added_to_a_finished_run_and_the_verdict_is_over_all(tmp_path: Path) -> None:
    phases = (Toy("baseline"), Toy("nvtx"))
    first, folder = run(tmp_path, phases[0], whole=phases)
    assert first.verdict is Verdict.PARTIAL
    before, journal = digests(folder / "baseline"), (folder / EVENTS_FILE).read_bytes()
    record = resume(folder, *phases, added="nvtx", command="again")
    assert (record.verdict, record.caveats) == (Verdict.GO, first.caveats)
    assert digests(folder / "baseline") == before
    assert (folder / EVENTS_FILE).read_bytes().startswith(journal), "append-only"
    assert record.phases[0] == first.phases[0]
    assert (record.options["phases"], record.command) == ("baseline,nvtx", "toy; again")
    assert verify(folder, *phases).differences == ()


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("gone", " and "),
        ("changed", "baseline/run1/training.csv: changed"),
        ("sealed anew", "baseline/run1/training.csv: differs from its digest in run.json"),
    ],
)
def test_a_run_of_which_a_file_is_gone_or_changed_gets_no_new_manifest(
    tmp_path: Path, how: str, word: str
) -> None:
    phases = (Toy("baseline"), Toy("nvtx"))
    _, folder = run(tmp_path, phases[0], whole=phases)
    log = folder / "baseline/run1/training.csv"
    shutil.rmtree(log.parent) if how == "gone" else log.write_text("step\n")
    if how == "sealed anew":
        write_manifest(folder)
    left = digests(folder)
    with pytest.raises(UsageError, match="is not what it was when it ended") as told:
        resume(folder, *phases, added="nvtx")
    assert word in str(told.value)
    assert digests(folder) == left


def test_no_run_begins_beside_one_of_the_future(tmp_path: Path) -> None:
    """By names it is known which of two runs is newer; a clock that went back spoils that."""
    _, folder = run(tmp_path, Toy("baseline"))
    folder.rename(tmp_path / "29991231T000000Z-nogit")
    with pytest.raises(UsageError, match="29991231T000000Z-nogit is of the future") as told:
        run(tmp_path, Toy("baseline"))
    assert "set the clock" in told.value.hint
    assert [one.name for one in run_folders(tmp_path)] == ["29991231T000000Z-nogit"]


def test_a_failure_that_went_away_stays_in_the_first_line(tmp_path: Path) -> None:
    mark = tmp_path / "once"
    phases = (Toy("baseline", words=("--fault", "exit7", "--once", str(mark))), Toy("nvtx"))
    first, folder = run(tmp_path / "out", *phases)
    assert first.verdict is Verdict.NO_GO
    before, manifest = digests(folder / "baseline"), (folder / MANIFEST_FILE).read_bytes()
    kept = (folder / "run.json").read_bytes()
    resume(folder, *phases)
    # What a crash between the decision and the move leaves: the first attempt where it was.
    cut_after(folder, "phase_repeated")
    (folder / MANIFEST_FILE).write_bytes(manifest)
    (folder / "run.json").write_bytes(kept)
    shutil.rmtree(folder / "baseline")
    (folder / "baseline.repeated1").rename(folder / "baseline")
    record = resume(folder, *phases)
    assert record.headline.startswith("GO for 2 of 76 checks, REPEATED (baseline after FAIL)")
    assert digests(folder / "baseline.repeated1") == before
    (told,) = record.phases[0].repeated
    assert (told.outcome, told.folder) == (Outcome.FAIL, "baseline.repeated1")
    assert told.reason.startswith("baseline.completed is FAIL: ")
    events, _ = read_events(folder / EVENTS_FILE)
    started = [event["phase"] for event in events if event["event"] == "launch_started"]
    assert started == ["baseline", "nvtx", "baseline"], "nvtx had passed"
    assert verify(folder, *phases).differences == ()


def test_a_later_phase_that_would_be_launched_otherwise_now_runs_again(tmp_path: Path) -> None:
    sweep = Toy("bucket_sweep", reads=("baseline",))
    phases = (Toy("baseline"), sweep)
    first, folder = run(tmp_path, sweep, whole=phases)
    assert first.phases[1].launches[0].launch.env == {}
    record = resume(folder, *phases, added="baseline")
    assert record.phases[1].launches[0].launch.env == {"NSA_DDP_BUCKET_MB": "25"}
    assert "REPEATED (bucket_sweep after PASS)" in record.headline
    assert verify(folder, *phases).differences == ()


def test_a_run_in_which_all_passed_has_nothing_to_run_again(tmp_path: Path) -> None:
    record, folder = run(tmp_path, Toy("baseline"))
    assert left_open(record) == []
    with pytest.raises(UsageError, match="has it already"):
        resume(folder, Toy("baseline"), added="baseline")
    with pytest.raises(UsageError, match=r"is finished: GO; `runbook run --resume .* --phase"):
        resume(folder, Toy("baseline"))
    manifest = folder / MANIFEST_FILE
    name = "  baseline/run1/training.csv"
    manifest.write_text(re.sub(f".{{8}}{name}", f"00000000{name}", manifest.read_text()))
    with pytest.raises(UsageError, match=r"what it was when it ended: baseline/run1/training\.csv"):
        resume(folder, Toy("baseline"))


@pytest.mark.parametrize("what", sorted(identity()))
def test_another_commit_machine_or_software_is_refused_by_name(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing added, nothing again: the rows of two commits would stand under the name of one."""
    cut_after(folder, "phase_finished")
    before = (folder / EVENTS_FILE).read_bytes()
    monkeypatch.setattr("runbook.engine.resuming.identity", lambda: identity() | {what: "another"})
    with pytest.raises(UsageError, match=rf"(?i){what}.* then, another now"):
        resume(folder, *PHASES.values())
    assert (folder / EVENTS_FILE).read_bytes() == before, "nothing was begun"


def test_what_the_collectors_wrote_is_kept_with_preflights_earlier_attempt(tmp_path: Path) -> None:
    """They write beside the phases' folders, and would overwrite it."""
    phase = Toy("preflight", collects=True)
    _, folder = run(tmp_path, Toy("preflight", words=("--fault", "exit7")))
    (folder / "facts.json").write_text("{}")
    (folder / "host.json").write_text("before")
    with Journal.reopen(folder) as journal:
        repeat(journal, derive_record(journal.events).phases[0])
        for _ in range(2):  # a crash may come at any moment: again is as good as once
            keep_aside(folder, journal, [phase])
            (folder / "host.json").write_text("after")
    aside = folder / "preflight.repeated1"
    assert (aside / "host.json").read_text() == "before"
    assert (aside / "facts.json").is_file() and (aside / "run1" / "result.json").is_file()
    assert (folder / "events.jsonl").is_file() and (folder / "run.json").is_file()
    assert not (folder / "facts.json").exists() and not (folder / "preflight").exists()
