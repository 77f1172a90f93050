"""The judge of a drill must be able to say no to each single thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nsa.contract import RUN_TOKEN_VARIABLE
from runbook.cli import main
from runbook.launch.observer import StopRequest
from runbook.records import LaunchResult, LaunchStatus
from runbook.tools.drill import FAULTS, DrillReport, Fault, judge_scene, run_drill
from runbook.tools.drill.scene import Scene, drill_launch
from tests.factory.files import HEADER, record, training, write_beats
from tests.tiers import by_tier

HANG = FAULTS["sleep"]


def scene(root: Path, **changes: object) -> Scene:
    """A hang of rank 1 that was noticed as promised, with files as a run leaves them."""
    launch = drill_launch(HANG, name="run")
    folder = root / "run"
    folder.mkdir(parents=True)
    write_beats(folder, 0, [record("progress", step=step) for step in (1, 2, 3)])
    (folder / "training.csv").write_text(training(3))
    files = ("run/stackdump_rank0_1.txt", "run/flight_rank0.json", "run/incident.json")
    cause = "hang: rank 1 silent for 3.1 s in phase step at step 6 (budget 3 s)"
    result = LaunchResult(status=LaunchStatus.HUNG, cause=cause, culprit_rank=1, evidence=files,
                          run_token="00")  # fmt: skip
    now = time.monotonic()
    fields: dict[str, object] = {"injected_at": now - 3.4, "ended_at": now, "result": result}
    return Scene(root=root, launch=launch, **(fields | changes))  # type: ignore[arg-type]


def problems(fault: Fault, seen: Scene) -> str:
    return "; ".join(judge_scene(fault, seen).problems)


def test_as_promised_is_good(tmp_path: Path) -> None:
    row = judge_scene(HANG, scene(tmp_path))
    assert row.ok and row.detected and row.culprit_right
    assert row.seconds == pytest.approx(3.4, abs=0.2)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"status": LaunchStatus.CRASHED}, "ended as crashed, wanted hung"),
        ({"culprit_rank": 0}, "blamed rank 0, wanted 1"),
        ({"cause": "something"}, "the cause does not say"),
        ({"evidence": ("run/flight_rank0.json", "run/incident.json")}, "no evidence stackdump"),
    ],
)
def test_each_wrong_answer_is_named(tmp_path: Path, change: dict[str, object], word: str) -> None:
    seen = scene(tmp_path)
    assert word in problems(HANG, replace(seen, result=seen.result.model_copy(update=change)))


def test_too_late_is_named(tmp_path: Path) -> None:
    seen = scene(tmp_path)
    late = replace(seen, injected_at=seen.ended_at - HANG.limit_s - 0.1)
    assert "allowed 5 s" in problems(HANG, late)
    assert "never injected" in problems(HANG, replace(seen, injected_at=None))


def test_a_lost_row_and_damage_are_named(tmp_path: Path) -> None:
    seen = scene(tmp_path)
    path = seen.run_dir / "training.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    assert "1 rows are lost" in problems(HANG, seen)
    path.write_text(path.read_text() + HEADER + "\n")
    assert "damaged" in problems(HANG, seen)


def test_an_orphan_is_named(tmp_path: Path) -> None:
    token = "feedfeedfeedfeed"
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
        env={**os.environ, RUN_TOKEN_VARIABLE: token},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert orphan.stdout is not None and orphan.stdout.readline(), "it carries its token"
        seen = scene(tmp_path)
        mine = seen.result.model_copy(update={"run_token": token})
        assert "1 processes were left" in problems(HANG, replace(seen, result=mine))
    finally:
        orphan.kill()
        orphan.communicate()


def test_a_control_with_a_note_is_a_false_alarm(tmp_path: Path) -> None:
    control = FAULTS["slow_phases"]
    seen = scene(tmp_path)
    fine = LaunchResult(status=LaunchStatus.COMPLETED, run_token="00")
    assert problems(control, replace(seen, result=fine)) == ""
    noted = fine.model_copy(update={"notes": ("straggler: rank 1",)})
    assert "false alarm" in problems(control, replace(seen, result=noted))
    # Beside other work a healthy rank may be late; a note that blames nobody is no alarm.
    busy = fine.model_copy(update={"notes": ("short of CPUs: rank 0 comes 11 ms late",)})
    assert problems(control, replace(seen, result=busy)) == ""
    late = FAULTS["straggler_20ms"]
    assert "no note says" in problems(late, replace(seen, result=fine))
    assert "no note says" in problems(late, replace(seen, result=busy))


def test_a_report_without_rows_or_cut_short_is_not_good(tmp_path: Path) -> None:
    row = judge_scene(HANG, scene(tmp_path))
    assert not DrillReport(rows=()).ok
    assert not DrillReport(rows=(row,), interrupted=True).ok
    assert DrillReport(rows=(row,)).ok
    summary = DrillReport(rows=(row, row)).summary()
    assert (summary["faults"], summary["kinds"], summary["culprit_right"]) == (2, 1, 2)
    assert summary["max_over_threshold_s"] == pytest.approx(0.4, abs=0.2)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--faults", "sigkil"]) == 2
    assert main(["drill", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {row["fault"] for row in listed["faults"]} == set(FAULTS)


# A death, a hang, a collective that differs, a slow rank. How the others end is told of the fake
# trainer in tests/launch (test_faults.py; test_monitor.py of what grows), and of the trainer's own
# words in tests/train (test_ends.py, test_loop.py, test_checkpoint.py).
ARCHETYPES = ("exit", "sleep_backward", "desync_op", "straggler_100ms")

_CROWDED_S = 12.0
# 20 ms may drown in what the other tests do to one launch, not in what they do to each of three.
_LAUNCHES = {"straggler_20ms": 3}


@pytest.mark.e2e
@pytest.mark.parametrize("name", by_tier(FAULTS, fast=ARCHETYPES.__contains__))
def test_is_noticed(tmp_path: Path, name: str) -> None:
    for number in range(_LAUNCHES.get(name, 1)):
        folder = tmp_path / str(number)
        report = run_drill([FAULTS[name]], folder, stop=StopRequest(), on_row=lambda _: None)
        (row,) = report.rows
        problems = [text for text in row.problems if not text.startswith("took ")]
        if not problems:
            break
    assert problems == [], row
    if row.seconds is not None and row.limit_s is not None:
        assert row.seconds < row.limit_s + _CROWDED_S
    # A good drill leaves no folder; one that was only late keeps its own.
    assert [path.name for path in folder.iterdir()] == ([] if row.ok else [f"001-{name}"])
    assert report.ok == row.ok
    assert report.ok or name != "exit", "the quickest of all is good in every respect"
    assert report.summary()["orphans"] == 0
