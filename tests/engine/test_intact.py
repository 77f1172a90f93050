"""A finished folder against its record: each thing that may differ, and what is said of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runbook.engine.derive import derive_record
from runbook.engine.intact import (
    differing_fields,
    journal_problems,
    planned_problems,
    unjudged_problems,
)
from runbook.errors import RunbookError
from runbook.folder.integrity import folder_problems
from runbook.records import LaunchEntry, PhaseRecord, Reason, RunRecord
from tests.cli.shell import inside
from tests.engine.toys import Toy, run, setup

PHASES = {"baseline": Toy("baseline", count=2)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("intact"), *PHASES.values())[1]


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / finished.name))


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


def test_a_manifest_that_is_none_is_said(folder: Path, record: RunRecord) -> None:
    assert folder_problems(folder, record) == []
    (folder / "MANIFEST.sha256").write_bytes(b"\xff\xfe no manifest\n")
    (text,) = folder_problems(folder, record)
    assert "MANIFEST.sha256" in text


def test_the_size_of_an_artifact_is_held_against_the_record(
    folder: Path, record: RunRecord
) -> None:
    first, *rest = record.artifacts
    for more in (1, -1):
        other = first.model_copy(update={"size_bytes": first.size_bytes + more})
        assert folder_problems(folder, record.model_copy(update={"artifacts": (other, *rest)})) == [
            f"{first.path}: its size differs from that in run.json"
        ]
    unfinished = record.model_copy(update={"artifacts": ()})
    assert folder_problems(folder, unfinished) == []


def test_an_artifact_is_a_file_of_its_own(folder: Path, record: RunRecord) -> None:
    path = folder / record.artifacts[0].path
    missing = f"{record.artifacts[0].path}: missing"
    path.rename(folder.parent / "elsewhere")
    assert folder_problems(folder, record).count(missing) == 2  # of the manifest, of the record
    path.symlink_to(folder.parent / "elsewhere")
    assert missing in folder_problems(folder, record)
    path.unlink()
    path.write_text("other\n")
    differs = f"{record.artifacts[0].path}: differs from its digest in run.json"
    assert differs in folder_problems(folder, record)


def test_a_torn_journal_is_said(folder: Path, record: RunRecord) -> None:
    with (folder / "events.jsonl").open("ab") as stream:
        stream.write(b'{"event"')
    assert journal_problems(folder, record) == ["events.jsonl: torn last line"]
    (folder / "events.jsonl").write_text("{}\n")
    (text,) = journal_problems(folder, record)
    assert text.startswith("events.jsonl: ")


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


def ended(folder: Path, record: RunRecord, **change: Any) -> list[str]:
    """What is said of the launches where no phase is there to plan them, the first one changed."""
    (one,) = [phase for phase in record.phases if phase.name == "baseline"]
    first, second = one.launches
    result = first.result.model_copy(update=change)
    entries = (LaunchEntry(launch=first.launch, result=result), second)
    changed = record.model_copy(update={"phases": (one.model_copy(update={"launches": entries}),)})
    made = setup(folder.parent, *PHASES.values())
    return planned_problems(changed, folder, made, phases={})


@pytest.mark.parametrize("gone", [("launch",), ("result",), ("launch", "result")])
def test_a_launch_that_does_not_say_how_it_went(
    folder: Path, record: RunRecord, gone: tuple[str, ...]
) -> None:
    assert ended(folder, record) == []
    for name in gone:
        (folder / "baseline/run1" / f"{name}.json").unlink()
    assert ended(folder, record) == ["baseline: launch run1: no launch.json or result.json"]
    (folder / "baseline/run2/result.json").write_text("[]")
    assert ended(folder, record)[1:] == [
        "baseline: launch run2: result.json does not hold a JSON object"
    ]


# Which phases were judged


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
