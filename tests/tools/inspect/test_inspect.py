"""`inspect` on directories made by hand: each fault alone makes exactly its own remark."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from runbook.console import rendered
from runbook.errors import UsageError
from runbook.tools.inspect import Inspection, inspection_parts
from runbook.tools.inspect.folder import inspect_path
from tests.cli.shell import inside
from tests.factory.files import write_rows
from tests.tools.inspect.faults import ALONE, FAULTS, low_loss, second_run, steps
from tests.tools.inspect.folders import healthy, legacy_run, row, write_env


def codes(inspection: Inspection) -> set[str]:
    return {remark.code.value for remark in inspection.remarks}


def test_a_healthy_run_is_not_suspicious(tmp_path: Path) -> None:
    inspection = inspect_path(healthy(tmp_path))
    assert (codes(inspection), inspection.exit_code) == (set(), 0)
    rows = inspection.directories[0].training
    assert (rows.rows, rows.legacy, len(rows.segments)) == (120, False, 1)
    assert rows.window_steps_available == 50
    last = rows.statistics[0]
    assert (last.name, last.n, str(last.window)) == ("toks_per_s_last50", 50, "steps 71-120")
    rates = [512 / (0.05 + 0.001 * math.sin(step)) for step in range(71, 121)]
    assert last.value == pytest.approx(sum(rates) / 50, rel=1e-5)


def test_the_older_form_with_three_runs_appended(tmp_path: Path) -> None:
    write_rows(tmp_path, legacy_run() * 3)
    inspection = inspect_path(tmp_path)
    assert codes(inspection) == {"mixed_runs", "warmup_in_window", "window_too_short"}
    assert inspection.exit_code == 1
    rows = inspection.directories[0].training
    assert rows.legacy
    assert [(s.first_step, s.last_step, s.rows, s.every) for s in rows.segments] == [
        (1, 200, 11, 20)
    ] * 3
    assert rows.window_steps_available == 3  # steps 160, 180, 200
    naive = rows.statistics[0]
    assert (naive.name, naive.n) == ("toks_per_s_last50_rows", 33)
    assert "rows of 3 runs, not steps" in naive.note
    rates = [float(line.split(",")[3]) for line in legacy_run() * 3]
    assert naive.value == pytest.approx(sum(rates) / 33)


def test_the_mean_of_two_rates_that_flatters(tmp_path: Path) -> None:
    """566 tok/s is the mean of 297 and 835; the same tokens over their time give 438."""
    write_rows(tmp_path, ["20,5.6,0.0001,297", "40,5.6,0.0001,835"])
    inspection = inspect_path(tmp_path)
    rows = inspection.directories[0].training
    (naive,) = [one for one in rows.statistics if one.name == "toks_per_s_last50_rows"]
    assert naive.value == 566
    assert "rates flatters: the same rows as tokens over time give 438.2 tok/s" in naive.note
    # Who wrote the log has averaged nothing, and is not suspected.
    assert codes(inspection) == {"window_too_short", *ALONE}


LITTLE: dict[str, tuple[Callable[[Path], object], set[str], int]] = {
    "an older run without a slow start": (
        lambda folder: write_rows(folder, legacy_run(first_rate=850.0)),
        {"window_too_short", *ALONE},
        3,
    ),
    "a short run of ours": (lambda folder: healthy(folder, steps=30), {"window_too_short"}, 3),
    "chance dips below the floor": (
        steps(lambda step: row(step, loss=5.545 - (0.09 if step % 10 == 0 else 0.0))),
        ALONE,
        3,
    ),
    "steps below zero": (
        steps(lambda step: row(step, loss=5.6 + step / 1000), *range(-9, 60)),
        {"unreadable", *ALONE},
        1,
    ),
}


def text_of(inspection: Inspection) -> str:
    return rendered(*inspection_parts(inspection))


@pytest.mark.parametrize("name", LITTLE)
def test_too_little_is_told_apart_from_suspicion(tmp_path: Path, name: str) -> None:
    make, expected, code = LITTLE[name]
    make(tmp_path)
    inspection = inspect_path(tmp_path)
    assert (codes(inspection), inspection.exit_code) == (expected, code)
    assert ("too little evidence to believe it" in text_of(inspection)) == (code == 3)


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_makes_its_own_finding(tmp_path: Path, name: str) -> None:
    folder, (fault, expected) = healthy(tmp_path), FAULTS[name]
    fault(folder)
    inspection = inspect_path(folder)
    assert codes(inspection) == expected
    assert inspection.exit_code == 1
    for code in expected:
        assert code in text_of(inspection)


def test_the_loss_floor_is_env_jsons_and_nobody_is_accused_without_one(tmp_path: Path) -> None:
    low_loss(healthy(tmp_path))
    for rank in range(2):
        (tmp_path / f"heartbeat_rank{rank}.jsonl").unlink()
    assert codes(inspect_path(tmp_path)) == {"below_floor", *ALONE}
    write_env(tmp_path, floor=None)
    assert codes(inspect_path(tmp_path)) == ALONE
    (tmp_path / "env.json").unlink()
    assert codes(inspect_path(tmp_path)) == ALONE


def test_directories_below_are_judged_and_links_are_not_followed(tmp_path: Path) -> None:
    healthy(tmp_path / "a" / "one")
    second_run(healthy(tmp_path / "b"))
    (tmp_path / "latest").symlink_to(tmp_path / "b")
    (tmp_path / "forbidden").symlink_to("/proc/1/cwd/x")
    inspection = inspect_path(tmp_path)
    assert [one.path for one in inspection.directories] == ["a/one", "b"]
    assert [remark.path for remark in inspection.remarks] == ["b/training.csv"]


def _digests(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.iterdir())
    }


def test_nothing_is_changed(tmp_path: Path) -> None:
    healthy(tmp_path)
    before = (_digests(tmp_path), tmp_path.stat().st_mtime_ns)
    inspect_path(tmp_path)
    assert (_digests(tmp_path), tmp_path.stat().st_mtime_ns) == before


def test_an_empty_directory_is_undecided_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    assert inspect_path(tmp_path).exit_code == 3
    with pytest.raises(UsageError, match="no such directory"):
        inspect_path(tmp_path / "absent")


@pytest.mark.executes("runbook inspect")
def test_the_command_prints_text_or_json_and_exits_by_what_it_found(tmp_path: Path) -> None:
    write_rows(tmp_path, legacy_run() * 2)
    told = inside("inspect", str(tmp_path), cwd=tmp_path)
    assert told.code == 1 and "2 runs in one file" in told.out
    told = inside("inspect", str(tmp_path), "--json", cwd=tmp_path)
    assert told.code == 1
    document = json.loads(told.out)
    assert document == json.loads(json.dumps(inspect_path(tmp_path).document()))
    assert (document["schema_version"], document["exit_code"]) == (2, 1)
    assert inside("inspect", str(tmp_path / "absent"), cwd=tmp_path).code == 2
