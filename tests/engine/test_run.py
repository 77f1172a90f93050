"""Runs over real processes: whatever happens, on a full disk too, a row says so."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runbook.cli.run.observers import print_summary
from runbook.console import Console
from runbook.engine import reasons_for
from runbook.engine.derive import REMEDY
from runbook.engine.run import run_setup
from runbook.folder import Journal, read_events
from runbook.folder.manifest import folder_problems, load_record
from runbook.launch.observer import Observer
from runbook.records import (
    ArmSchedule,
    Check,
    Launch,
    LaunchResult,
    LaunchStatus,
    Outcome,
    PhaseRecord,
    Reason,
    RunRecord,
    Verdict,
)
from runbook.tools.inspect.folder import inspect_path
from tests import executed
from tests.cli.shell import inside
from tests.engine.test_interrupt_and_resume import cut_after
from tests.engine.toys import Toy, resume, run, verify
from tests.engine.toys import setup as toys_setup
from tests.factory import records
from tests.factory.programs import program


def by_id(record: RunRecord) -> dict[str, Check]:
    return {check.id: check for check in record.checks()}


def test_a_run_that_goes_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a person without an activated environment: the page says how its commands are typed."""
    script = program(tmp_path / "my env" / "runbook", f'exec {sys.executable} -m runbook "$@"')
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", [str(script)])
    record, folder = run(
        tmp_path / "runs", Toy("baseline"), Toy("bucket_sweep", count=2, reads=("baseline",))
    )
    assert record.verdict is Verdict.GO
    assert record.reasons == ("all 4 required checks passed",)
    assert [phase.outcome for phase in record.phases] == [Outcome.PASS] * 2
    assert all(check.required for check in record.checks())
    assert load_record(folder) == record
    assert folder_problems(folder, load_record(folder)) == []
    assert folder.stat().st_mode & 0o777 == 0o700
    # What the first phase chose reached the second one's plan, and the exports.
    assert record.phases[1].launches[0].launch.env == {"NSA_DDP_BUCKET_MB": "25"}
    assert record.exports["NSA_DDP_BUCKET_MB"] == "25"
    digests = {artifact.path for artifact in record.artifacts}
    assert "baseline/run1/training.csv" in digests and "run.json" not in digests
    told = r"^- Commands of this page: .* for `runbook` type `(.*)` there$"
    (typed,) = re.findall(told, (folder / "report.md").read_text(), re.MULTILINE)
    command = ["sh", "-c", f"{typed} report {folder}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert record.run_id in shown.stdout


def test_what_preflight_refuses_starts_no_launch_of_later_phases(tmp_path: Path) -> None:
    notes: list[str] = []

    class Ear(Observer):
        def note(self, text: str) -> None:
            notes.append(text)

    sick = Toy("preflight", words=("--fault", "exit7"), guards=True)
    phases = (sick, Toy("baseline", count=2), Toy("nvtx"))
    record, folder = run(tmp_path, *phases, observer=Ear())
    assert sum("later phases start nothing" in note for note in notes) == 1
    cut_after(folder, "phase_finished")
    for part in (record, resume(folder, *phases)):  # a run that goes on remembers it
        cause = by_id(part)["preflight.completed"].reason
        for phase in part.phases[1:]:
            assert not (folder / phase.name).exists(), "nothing was started"
            assert {entry.result.status for entry in phase.launches} == {LaunchStatus.NOT_RUN}
            told = {entry.result.cause for entry in phase.launches}
            assert told == {f"preflight.completed is FAIL: {cause}; see --keep-going"}
        assert part.verdict is Verdict.NO_GO
    notes.clear()
    run(tmp_path / "alone", sick, observer=Ear())
    assert not any("later phases" in note for note in notes), "there is none"


@pytest.mark.parametrize("keep_going", [False, True])
def test_a_guard_that_could_not_be_judged_holds_back_unless_asked_to_go_on(
    tmp_path: Path, keep_going: bool
) -> None:
    phases = (Toy("preflight", breaks="judge", guards=True), Toy("baseline"))
    record, _ = run(tmp_path, *phases, keep_going=keep_going)
    assert record.phases[0].outcome is Outcome.INCOMPLETE
    assert record.phases[1].outcome is (Outcome.PASS if keep_going else Outcome.INCOMPLETE)
    assert record.verdict is Verdict.INCOMPLETE


def test_a_guard_whose_other_rows_are_wrong_holds_nothing_back(tmp_path: Path) -> None:
    """Only what the profile requires of it does; and a row that a phase forgets cannot vanish."""
    phases = (Toy("preflight", forgets=True, guards=True), Toy("baseline"))
    asked = toys_setup(tmp_path, *phases)
    few = asked.profile.model_copy(update={"required": ("preflight.completed", "baseline.rate")})
    record = run_setup(dataclasses.replace(asked, profile=few), observer=Observer())
    forgotten = by_id(record)["preflight.rate"]
    assert (forgotten.outcome, forgotten.code) == (Outcome.INCOMPLETE, Reason.HARNESS_ERROR)
    assert record.phases[1].outcome is Outcome.PASS


@pytest.mark.parametrize("where", ["plan", "judge"])
def test_a_defect_of_the_runbook_is_incomplete_and_keeps_its_traceback(
    tmp_path: Path, where: str
) -> None:
    (record, folder), (_, other) = (
        run(tmp_path, Toy("baseline", breaks=where), Toy("bucket_sweep")) for _ in range(2)
    )
    assert folder != other, "two runs never share one"
    assert record.verdict is Verdict.INCOMPLETE
    row = by_id(record)["baseline.completed"]
    assert (row.outcome, row.code) == (Outcome.INCOMPLETE, Reason.HARNESS_ERROR)
    assert f"planted in {where}" in row.reason
    assert "Traceback" in (folder / row.evidence[0]).read_text()
    assert len(record.phases[0].launches) == (1 if where == "judge" else 0)
    assert record.phases[1].outcome is Outcome.PASS


def test_a_schedule_ends_early_when_its_phase_has_seen_enough(tmp_path: Path) -> None:
    schedule = ArmSchedule(
        settings={"a": {}, "b": {}}, rounds=(("a", "b"),) * 40, steps=3, warmup_steps=1
    )
    phase = Toy("baseline", schedule=schedule, words=("--dt", "0.05"), steps=schedule.total_steps)
    record, folder = run(tmp_path, phase)
    assert (folder / "baseline/run1/.ENOUGH").exists()
    lines = (folder / "baseline/run1/training.csv").read_text().splitlines()
    assert len(lines) < 100
    assert record.verdict is Verdict.GO


def test_the_published_schema_is_current() -> None:
    """`python scripts/schemas.py` writes it after every change of a record."""
    path = Path(__file__).parents[2] / "docs" / "run.schema.json"
    document = json.loads(path.read_text())
    assert document.pop("$schema") == "https://json-schema.org/draft/2020-12/schema"
    assert document == RunRecord.model_json_schema()


def test_the_verdict_names_what_is_invalid_before_the_failure_that_follows_from_it() -> None:
    def check(name: str, outcome: Outcome, follows: str = "") -> Check:
        return records.check(name, outcome, reason=f"{name} is bad", follows=follows)

    root = check("preflight.link", Outcome.INVALID)
    failed = check("baseline.rate", Outcome.FAIL, follows=root.id)
    again = check("nvtx.share", Outcome.FAIL, follows=failed.id)
    other = check("nvtx.other", Outcome.FAIL)
    checks = [failed, again, other, root]
    assert reasons_for(checks, [one.id for one in checks]) == (
        "preflight.link is INVALID: preflight.link is bad; "
        "so baseline.rate is FAIL, nvtx.share is FAIL",
        "nvtx.other is FAIL: nvtx.other is bad",
    )
    circle = [check("a.x", Outcome.FAIL, follows="a.y"), check("a.y", Outcome.FAIL, follows="a.x")]
    assert len(reasons_for(circle, ["a.x", "a.y"])) >= 1


class Looks(Observer):
    """Where `latest` leads as each launch ends."""

    def __init__(self, out: Path) -> None:
        self.link, self.seen = out / "latest", list[Path]()

    def launch_finished(self, launch: Launch, result: LaunchResult) -> None:
        self.seen.append(self.link.resolve())


def test_latest_leads_to_each_launch_and_is_no_part_of_a_run(tmp_path: Path) -> None:
    looks, toys = Looks(tmp_path), (Toy("baseline", count=2), Toy("nvtx"))
    _, folder = run(tmp_path, *toys, observer=looks)
    wanted = [folder / name for name in ("baseline/run1", "baseline/run2", "nvtx/run1")]
    assert looks.seen == wanted
    assert (tmp_path / "latest" / "heartbeat_rank0.jsonl").is_file()
    assert folder_problems(folder, load_record(folder)) == []
    assert verify(folder, *toys).differences == ()
    assert len(inspect_path(tmp_path).directories) == len(wanted), "each launch once"
    assert str(folder) in inside("report", "--out", str(tmp_path), cwd=tmp_path).out


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Every write beyond `size` bytes of a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Scale(Observer):
    """How large run.json is after each phase."""

    def __init__(self, out: Path) -> None:
        self.out, self.sizes = out, list[int]()

    def phase_finished(self, record: PhaseRecord) -> None:
        self.sizes.append(next(self.out.glob("*/run.json")).stat().st_size)


def test_a_refused_event_leaves_no_half_line(tmp_path: Path) -> None:
    with Journal.create(tmp_path) as journal:
        journal.append("one")
        with largest_file(journal.path.stat().st_size + 20), pytest.raises(OSError):
            journal.append("two", text="x" * 100)
        journal.append("three")
    events, _ = read_events(tmp_path / "events.jsonl")
    assert [(event["seq"], event["event"]) for event in events] == [(1, "one"), (2, "three")]


def test_on_a_full_disk_screen_exit_code_and_record_agree_and_never_go(tmp_path: Path) -> None:
    """A NO-GO that no file holds is none; under --quiet it is said, too."""
    phases = (Toy("baseline"), Toy("nvtx", words=("--fault", "exit7")))
    run(tmp_path / "whole", *phases, observer=(scale := Scale(tmp_path / "whole")))
    first, last = scale.sizes
    for limit, verdict in ((first + 200, Verdict.INCOMPLETE), (last + 500, Verdict.NO_GO)):
        with largest_file(limit):
            told, folder = run(tmp_path / f"limited{limit}", *phases)
        kept = load_record(folder)
        assert told.verdict is kept.verdict is verdict
        assert kept.phases[0].outcome is Outcome.PASS, "it was written before, and is whole"
        assert not [*folder.glob("*.tmp"), *folder.glob(".*.tmp")]
        for quiet in (False, True):
            out, err = io.StringIO(), io.StringIO()
            print_summary(Console(stdout=out, stderr=err, quiet=quiet), told, folder)
            assert out.getvalue().startswith(verdict) and "fingerprint" not in out.getvalue()
            assert "the run's files cannot be written" in (err if quiet else out).getvalue()


@pytest.mark.executes("ulimit -f")
def test_the_printed_command_takes_the_limit_of_a_file_away() -> None:
    line = "ulimit -f unlimited"
    shell = subprocess.run(
        ["bash", "-c", f"ulimit -S -f 1 && {line} && ulimit -f"], capture_output=True, text=True
    )
    executed.note(line, shell.returncode)
    assert (shell.returncode, shell.stdout) == (0, "unlimited\n"), shell.stderr
    assert f"`{line}`" in REMEDY
