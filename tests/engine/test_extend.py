"""A run that goes on beyond what was asked: phases added, phases run again, nothing hidden."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runbook.engine.derive import derive_record
from runbook.engine.starting import keep_aside, left_open, repeat
from runbook.errors import UsageError
from runbook.folder import EVENTS_FILE
from runbook.folder.journal import Journal, read_events
from runbook.machine.identity import identity
from runbook.records import Outcome, Verdict
from tests.engine.test_interrupt_and_resume import cut_after, digests
from tests.engine.toys import PHASES, Toy, resume, run, verify


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
    ("damage", "says"),
    [
        (lambda path: path.write_text("step\n"), "baseline/run1/training.csv: changed"),
        (lambda path: shutil.rmtree(path.parent), " and "),
    ],
)
def test_a_run_of_which_a_file_is_gone_or_changed_gets_no_new_manifest(
    tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    phases = (Toy("baseline"), Toy("nvtx"))
    _, folder = run(tmp_path, phases[0], whole=phases)
    damage(folder / "baseline/run1/training.csv")
    left = digests(folder)
    with pytest.raises(UsageError, match="is not what it was when it ended") as told:
        resume(folder, *phases, added="nvtx")
    assert says in str(told.value)
    assert digests(folder) == left


def test_a_failure_that_went_away_stays_in_the_first_line(tmp_path: Path) -> None:
    mark = tmp_path / "once"
    phases = (Toy("baseline", words=("--fault", "exit7", "--once", str(mark))), Toy("nvtx"))
    first, folder = run(tmp_path / "out", *phases)
    assert first.verdict is Verdict.NO_GO
    before = digests(folder / "baseline")
    resume(folder, *phases)
    # What a crash between the decision and the move leaves: the first attempt where it was.
    cut_after(folder, "phase_repeated")
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
    with pytest.raises(UsageError, match=r"is finished: GO.*--phase NAME adds a phase"):
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
