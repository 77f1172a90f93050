"""A disk that refuses: what was written stays readable, and the verdict says so."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runbook.engine.journal import Journal, read_events
from runbook.launch.observer import Observer
from runbook.records import PhaseRecord, RunRecord, Verdict
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


def test_a_refused_event_leaves_no_half_line(tmp_path: Path) -> None:
    with Journal.create(tmp_path) as journal:
        journal.append("one")
        with largest_file(journal.path.stat().st_size + 20), pytest.raises(OSError):
            journal.append("two", text="x" * 100)
        journal.append("three")
    events, _ = read_events(tmp_path / "events.jsonl")
    assert [(event["seq"], event["event"]) for event in events] == [(1, "one"), (2, "three")]


def test_a_full_disk_is_a_reason_and_never_go(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Scale(Observer):
        def phase_finished(self, record: PhaseRecord) -> None:
            sizes.append(next(tmp_path.glob("*/run.json")).stat().st_size)

    phases = (Toy("baseline"), Toy("bucket_sweep"))
    run(tmp_path, *phases, observer=Scale())
    with largest_file(sizes[0] + 200):
        record, folder = run(tmp_path, *phases)
    assert record.verdict is Verdict.INCOMPLETE
    assert "cannot be written" in record.reasons[0]
    # The first phase was written before, and is still there, whole.
    kept = RunRecord.model_validate_json((folder / "run.json").read_text())
    assert kept.phases[0].outcome == "PASS"
    assert not list(folder.glob("*.tmp"))
    assert not list(folder.glob(".*.tmp"))
