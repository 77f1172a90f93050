"""A finished record against its journal and its phases: what may differ, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runbook.engine.derive import derive_record
from runbook.engine.intact import differing_fields, unjudged_problems
from runbook.engine.verify import compare_phases
from runbook.errors import RunbookError
from runbook.records import Mark, PhaseRecord, Reason, RunRecord
from tests.cli.shell import inside
from tests.engine.toys import PHASES, Toy
from tests.reports.pictures import record as pictured
from tests.reports.pictures import series


@pytest.fixture
def record(folder: Path) -> RunRecord:
    return RunRecord.model_validate_json((folder / "run.json").read_text())


def test_each_leaf_that_differs_is_named_once() -> None:
    old = {"a": 1, "b": {"x": {"y": 1}, "same": [1]}, "only": None, "gone": 2, "kind": {"z": 1}}
    new = {"a": 1.0, "b": {"x": {"y": 2}, "same": [1]}, "kind": 3, "new": "n"}
    assert differing_fields(old, new) == [
        "a: recorded 1, recomputed 1.0",
        "b.x.y: recorded 1, recomputed 2",
        "gone: recorded 2, recomputed null",
        'kind: recorded {"z": 1}, recomputed 3',
        'new: recorded null, recomputed "n"',
    ]


@pytest.mark.parametrize(
    ("event", "change", "why"),
    [
        ("run_started", {"record": None}, "Input should be a valid dictionary"),
        ("run_started", {"record": {}}, "tool_version: Field required"),
        ("phase_finished", {"record": 5}, "Input should be a valid dictionary"),
        ("phase_finished", {}, "it lacks 'record'"),
        ("run_finished", {"artifacts": 5}, "not iterable"),
    ],
)
def test_an_event_that_this_program_never_writes_is_told(
    folder: Path, event: str, change: dict[str, Any], why: str
) -> None:
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    place = next(number for number, one in enumerate(events) if one["event"] == event)
    taken = {name: value for name, value in events[place].items() if name not in ("record",)}
    events[place] = taken | change
    with pytest.raises(RunbookError, match=f"events.jsonl holds an event .*{why}"):
        derive_record(events)
    path.write_text("".join(f"{json.dumps(one)}\n" for one in events))
    ended = inside("run", "--resume", str(folder), "--out", str(folder.parent), cwd=folder.parent)
    assert ended.code == 2 and "internal error" not in ended.err, ended.err


def judged(record: RunRecord, *codes: Reason | None, **change: Any) -> PhaseRecord:
    """Phase baseline with checks of these codes; None stands for what the check says itself."""
    (one,) = [phase for phase in record.phases if phase.name == "baseline"]
    checks = tuple(
        one.checks[0] if code is None else one.checks[0].model_copy(update={"code": code})
        for code in codes
    )
    return one.model_copy(update={"checks": checks, **change})


def test_a_phase_that_was_started_and_not_judged_leaves_a_trace(
    folder: Path, record: RunRecord
) -> None:
    def said(phase: PhaseRecord, interrupted: bool = False, **phases: Toy) -> Iterator[str]:
        change = {"phases": (phase,), "interrupted": interrupted}
        return unjudged_problems(record.model_copy(update=change), folder, phases=phases)

    cut = judged(record, Reason.HARNESS_ERROR)
    assert list(said(judged(record, None), **PHASES)) == []
    assert list(said(cut, interrupted=True, **PHASES)) == []
    assert list(said(cut, **PHASES)) == ["baseline: not judged, and nothing shows why"]
    (folder / "harness_error_baseline_1.txt").touch()
    assert list(said(cut, **PHASES)) == []
    assert list(said(cut)) == [
        "baseline: no phase of this name is installed, so it was not judged again"
    ]
    assert list(said(judged(record, started_at=""))) == []


def phase(*, level: float = 2.0, point: float = 3.0) -> PhaseRecord:
    curve = series([1.0, point], limits=[Mark(label="limit", value=level)])
    (made,) = pictured(curves=[curve]).phases
    return made


def test_a_picture_that_was_edited_or_left_out_is_a_difference() -> None:
    assert compare_phases(phase(), phase()) == []
    for edited in (phase(level=9.0), phase(point=9.0)):
        (problem,) = compare_phases(edited, phase())
        assert problem.startswith("sweep: series 'run'")
    none = phase().model_copy(update={"series": ()})
    assert compare_phases(none, phase()) and compare_phases(phase(), none)
