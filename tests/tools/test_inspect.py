"""`inspect` on a real run: each fault that is planted there alone makes exactly its own remark."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runbook.console import rendered
from runbook.errors import UsageError
from runbook.tools.inspect import Inspection, inspection_parts
from runbook.tools.inspect.folder import inspect_path
from tests.cli.shell import inside
from tests.factory.files import write_beats, write_rows
from tests.frozen.corpus import unpack
from tests.shared import once

Fault = Callable[[Path], object]
Record = dict[str, Any]
# What rows without heartbeats, or with those of another trainer, always get.
ALONE = {"no_second_source"}


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run that was GO, for reading only."""
    return once(tmp_path_factory, "inspected", lambda folder: unpack("go", folder))


def copied(launch: Path, folder: Path) -> Path:
    """The rows, heartbeats and environment of one of its launches."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("training.csv", "env.json", "heartbeat_rank0.jsonl", "heartbeat_rank1.jsonl"):
        shutil.copy(launch / name, folder)
    return folder


@pytest.fixture
def healthy(kept: Path, tmp_path: Path) -> Path:
    """A good launch of 60 steps on two ranks."""
    return copied(kept / "baseline/run1", tmp_path / "run1")


def lines_of(folder: Path) -> list[str]:
    return (folder / "training.csv").read_text().splitlines()


def rows(change: Callable[[list[str]], list[str]]) -> Fault:
    """training.csv with its lines changed; the first is its header."""
    return lambda folder: write_rows(folder, change(lines_of(folder)))


def column(name: str, of: Callable[[int, float], object]) -> Fault:
    """training.csv with other values in a column, by step and value."""

    def changed(lines: list[str]) -> list[str]:
        at = lines[0].split(",").index(name)
        cells = [line.split(",") for line in lines[1:]]
        new = [[*row[:at], str(of(int(row[0]), float(row[at]))), *row[at + 1 :]] for row in cells]
        return [lines[0], *map(",".join, new)]

    return rows(changed)


def beats(rank: int, change: Callable[[list[Record]], list[Record]]) -> Fault:
    """The heartbeats of a rank with their lines changed."""

    def fault(folder: Path) -> None:
        text = (folder / f"heartbeat_rank{rank}.jsonl").read_text()
        write_beats(folder, rank, change([json.loads(line) for line in text.splitlines()]))

    return fault


def all_of(*faults: Fault) -> Fault:
    return lambda folder: [fault(folder) for fault in faults]


second_run = rows(lambda lines: lines + lines[1:])
low_loss = column("loss", lambda step, _: 5.6 - 0.01 * step)
ODD = {"embedded": "x", "data": 5, "moved": "far", "oracle": [1], "missing": 3}

# Each fault, and the remarks that it alone makes of a healthy run.
FAULTS: dict[str, tuple[Fault, set[str]]] = {
    "second run": (second_run, {"mixed_runs"}),
    # Neither at the end, where the heartbeats' last step would tell, nor in the last 50.
    "two writers": (
        rows(lambda lines: [*lines[:9], lines[5], *lines[9:]]),
        {"steps_not_increasing", "missing_steps"},
    ),
    "missing steps": (rows(lambda lines: lines[:4] + lines[8:]), {"missing_steps", "unbalanced"}),
    "slow start": (
        all_of(
            column("dt_s", lambda step, _: 0.8 if step <= 25 else 0.2),
            column("toks_per_s", lambda step, _: 320.0 if step <= 25 else 1280.0),
        ),
        {"warmup_in_window", "unbalanced"},
    ),
    "low loss": (low_loss, {"below_floor", "unbalanced"}),
    "chance dips below the floor": (
        column("loss", lambda step, _: 5.545 - (0.09 if step % 10 == 0 else 0.0)),
        {"unbalanced"},
    ),
    "nan loss": (
        column("loss", lambda step, loss: "nan" if step == 50 else loss),
        {"non_finite", "unbalanced"},
    ),
    "edited rate": (
        column("toks_per_s", lambda step, rate: 20000 if step == 40 else rate),
        {"rate_does_not_follow", "unbalanced"},
    ),
    "torn row": (rows(lambda lines: [*lines, "61,5.6,0.0"]), {"torn_rows"}),
    "fewer rows than heartbeats": (
        rows(lambda lines: lines[:-3]),
        {"rows_and_heartbeats", "unbalanced"},
    ),
    "no header": (
        rows(lambda lines: ["iteration" + lines[0], *lines[1:]]),
        {"unreadable", "window_too_short"},
    ),
    "other tokens": (
        column("tokens", lambda step, _: 128 if step < 40 else 256),
        {"tokens_change", "unbalanced", "rate_does_not_follow"},
    ),
    "constant loss": (column("loss", lambda *_: 5.6), {"constant_column", "unbalanced"}),
    # Which steps are computed twice follows from the token.
    "token of another run": (
        beats(1, lambda told: [one | {"token": "ffff"} for one in told]),
        {"other_run", "unbalanced"},
    ),
    "lines of another rank": (
        beats(1, lambda told: [one | {"rank": 0} for one in told]),
        {"other_run"},
    ),
    "silent rank": (
        beats(1, lambda told: [one for one in told if one["step"] <= 57]),
        {"silent_rank", "rows_and_heartbeats", *ALONE},
    ),
    "no heartbeats": (
        lambda folder: (folder / "heartbeat_rank1.jsonl").unlink(),
        {"missing_rank", *ALONE},
    ),
    "wall clock back": (
        beats(0, lambda told: [*told[:62], told[62] | {"ts": 1000}, *told[63:]]),
        {"clock_back"},
    ),
    "bad exit": (
        beats(0, lambda told: [*told[:-1], told[-1] | {"code": 11}]),
        {"failed_exit", *ALONE},
    ),
    "odd fields": (
        beats(0, lambda told: [one | {k: ODD[k] for k in ODD.keys() & one.keys()} for one in told]),
        {"unreadable", "unbalanced"},
    ),
    "halted": (lambda folder: (folder / ".HALT").touch(), {"halted"}),
}


def legacy_run(*, first_rate: float = 620.0) -> list[str]:
    """Rows of one run in the older form: step 1, then one row per 20 steps."""
    rates = {1: first_rate, **{step: 850 + step % 7 for step in range(20, 201, 20)}}
    return [f"{step},{5.6 + 0.001 * (step % 7)},0.0001,{rate}" for step, rate in rates.items()]


def codes(inspection: Inspection) -> set[str]:
    return {remark.code.value for remark in inspection.remarks}


def test_a_healthy_run_is_not_suspicious(healthy: Path) -> None:
    before = {path: path.read_bytes() for path in healthy.iterdir()}
    inspection = inspect_path(healthy)
    assert {path: path.read_bytes() for path in healthy.iterdir()} == before
    assert (codes(inspection), inspection.exit_code) == (set(), 0)
    rows = inspection.directories[0].training
    assert (rows.rows, rows.legacy, len(rows.segments)) == (60, False, 1)
    assert rows.window_steps_available == 50
    last = rows.statistics[0]
    assert (last.name, last.n, str(last.window)) == ("toks_per_s_last50", 50, "steps 11-60")
    rates = [float(line.split(",")[3]) for line in lines_of(healthy)[11:]]
    assert last.value == pytest.approx(sum(rates) / 50, rel=1e-5)


def test_the_older_form_with_three_runs_appended(tmp_path: Path) -> None:
    write_rows(tmp_path, legacy_run() * 3)
    inspection = inspect_path(tmp_path)
    assert codes(inspection) == {"mixed_runs", "window_too_short"}
    assert inspection.exit_code == 1
    rows = inspection.directories[0].training
    assert rows.legacy
    assert [(s.first_step, s.last_step, s.rows, s.every) for s in rows.segments] == [
        (1, 200, 11, 20)
    ] * 3
    assert rows.window_steps_available == 3  # steps 160, 180, 200


def test_rates_of_a_log_without_times_are_tokens_over_time(tmp_path: Path) -> None:
    """566 tok/s is the mean of 297 and 835; the same tokens over their time give 438."""
    write_rows(tmp_path, ["20,5.6,0.0001,297", "40,5.6,0.0001,835"])
    inspection = inspect_path(tmp_path)
    (rate,) = inspection.directories[0].training.statistics
    assert rate.value == pytest.approx(438.2, abs=0.05)
    assert codes(inspection) == {"window_too_short", *ALONE}


def text_of(inspection: Inspection) -> str:
    return rendered(*inspection_parts(inspection))


def test_too_little_is_told_apart_from_suspicion(kept: Path, tmp_path: Path) -> None:
    (older := tmp_path / "older").mkdir()
    write_rows(older, legacy_run(first_rate=850.0))
    ours = copied(kept / "nvtx/profiled", tmp_path / "ours")
    for folder, more in ((older, ALONE), (ours, set())):
        inspection = inspect_path(folder)
        assert (codes(inspection), inspection.exit_code) == ({"window_too_short", *more}, 3)
        assert "too little evidence to believe it" in text_of(inspection)


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_makes_its_own_finding(healthy: Path, name: str) -> None:
    fault, expected = FAULTS[name]
    fault(healthy)
    inspection = inspect_path(healthy)
    assert codes(inspection) == expected
    assert inspection.exit_code == 1
    text = text_of(inspection)
    assert [code for code in expected if code not in text] == []
    assert "too little evidence to believe it" not in text


def test_the_loss_floor_is_env_jsons_and_nobody_is_accused_without_one(healthy: Path) -> None:
    low_loss(healthy)
    for rank in range(2):
        (healthy / f"heartbeat_rank{rank}.jsonl").unlink()
    assert codes(inspect_path(healthy)) == {"below_floor", *ALONE}
    env = json.loads((healthy / "env.json").read_text())
    env["effective"]["loss_floor"] = None
    (healthy / "env.json").write_text(json.dumps(env))
    assert codes(inspect_path(healthy)) == ALONE
    (healthy / "env.json").unlink()
    assert codes(inspect_path(healthy)) == ALONE


def test_directories_below_are_judged_and_links_are_not_followed(
    healthy: Path, tmp_path: Path
) -> None:
    second_run(copied(healthy, tmp_path / "b"))
    (tmp_path / "latest").symlink_to(tmp_path / "b")
    (tmp_path / "forbidden").symlink_to("/proc/1/cwd/x")
    inspection = inspect_path(tmp_path)
    assert [one.path for one in inspection.directories] == ["b", "run1"]
    assert [remark.path for remark in inspection.remarks] == ["b/training.csv"]


def test_what_a_trainer_of_ones_own_wrote_is_said_not_to_be_read(
    healthy: Path, tmp_path: Path
) -> None:
    (tmp_path / "baseline/own").mkdir(parents=True)
    shutil.copy(healthy / "env.json", tmp_path / "baseline/launch.json")
    inspection = inspect_path(tmp_path)
    assert (codes(inspection), inspection.exit_code) == ({"nothing_found"}, 3)
    assert "baseline/own: of a trainer of your own, not read here" in text_of(inspection)


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
