"""A disk that refuses: what was written stays readable, and the verdict says so."""

from __future__ import annotations

import io
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runbook.cli.run.observers import print_summary
from runbook.console import Console
from runbook.engine.derive import REMEDY
from runbook.folder.journal import Journal, read_events
from runbook.launch.observer import Observer
from runbook.records import PhaseRecord, RunRecord, Verdict
from tests import executed
from tests.engine.toys import Toy, run


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


def test_a_full_disk_is_a_reason_and_never_go(tmp_path: Path) -> None:
    phases = (Toy("baseline"), Toy("bucket_sweep"))
    run(tmp_path, *phases, observer=(scale := Scale(tmp_path)))
    with largest_file(scale.sizes[0] + 200):
        record, folder = run(tmp_path, *phases)
    assert record.verdict is Verdict.INCOMPLETE
    assert "cannot be written" in record.reasons[0]
    # The first phase was written before, and is still there, whole.
    kept = RunRecord.model_validate_json((folder / "run.json").read_text())
    assert kept.phases[0].outcome == "PASS"
    assert not [*folder.glob("*.tmp"), *folder.glob(".*.tmp")]


def test_screen_exit_code_and_record_agree_where_the_record_was_refused(tmp_path: Path) -> None:
    """A NO-GO that no file holds is none; under --quiet it is said, too."""
    failing = Toy("baseline", words=("--fault", "exit7"))
    scale = Scale(tmp_path / "whole")
    run(tmp_path / "whole", failing, observer=scale)
    for limit, verdict in ((-500, Verdict.INCOMPLETE), (500, Verdict.NO_GO)):
        with largest_file(scale.sizes[0] + limit):
            told, folder = run(tmp_path / f"limited{limit}", failing)
        kept = RunRecord.model_validate_json((folder / "run.json").read_text())
        assert told.verdict is kept.verdict is verdict
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
