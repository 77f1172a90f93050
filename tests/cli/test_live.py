"""`runbook watch` refuses a directory in which no run will ever write, and names the right one."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from runbook.cli import live, main
from runbook.cli.live import watched
from runbook.errors import UsageError
from runbook.launch.watch import RankWatch
from tests.cli.shell import inside
from tests.factory import files


def launched(folder: Path, name: str, *, kind: str = "trainer") -> Path:
    """The directory of a launch that is over, which the link `latest` names."""
    run = folder / name
    run.mkdir(parents=True)
    if kind == "trainer":
        files.write_rows(run, [files.HEADER, files.row(1)])
        files.write_beats(run, 0, [files.record("exit", step=1, code=0, pid=None)])
    (folder / ".next").symlink_to(name)
    (folder / ".next").replace(folder / "latest")
    return run


@pytest.mark.parametrize("before", [False, True])
def test_a_watchdog_that_is_started_before_the_trainer_waits_for_it(
    before: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The order of the documents; the folder may not be there yet, or its newest run be over."""
    folder = tmp_path / "artifacts/m7c_125m_2xa100_prod"
    if before:
        launched(folder, "20260101T000000Z-abc")
    monkeypatch.setattr(live, "sleep", lambda _: launched(folder, "20260102T000000Z-def"))
    assert main(["watch", str(folder), "--halt", "1", "--interval", "30"]) == 0
    said = capsys.readouterr().err
    why = f"{folder}/20260101T000000Z-abc is over" if before else "nothing has written there yet"
    assert f"waiting for a run to begin in {folder}, 300 s at most: {why}\n" in said
    assert f"watching {folder}; the run is stopped at an anomaly\n" in said
    assert f"now {folder}/20260102T000000Z-def\n" in said
    assert said.count("ended at step 1") == 1 and "the run is over; 0 anomalies, 1 row" in said


def test_a_run_that_is_over_is_told_once_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = launched(tmp_path, "20260101T000000Z-abc")
    wait, waits = RankWatch.wait, []

    def waited(watch: RankWatch, within_s: float, **more: int) -> None:
        waits.append(within_s)
        wait(watch, 0.0, **more)

    monkeypatch.setattr(RankWatch, "wait", waited)
    assert main(["watch", str(run)]) == 0
    assert capsys.readouterr().err.count("ended at step 1") == 1
    assert set(waits) == {0.0}, "it paused"


@pytest.mark.executes("runbook watch")
def test_a_whole_run_by_its_folder_or_id_means_its_newest_launch(tmp_path: Path) -> None:
    run = "20260101T000000Z-abc"
    for name, age_s in (("baseline/run1", 60), ("long_run/run", 5), ("nvtx/run", 90)):
        beat = tmp_path / "artifacts" / run / name / "heartbeat_rank0.jsonl"
        beat.parent.mkdir(parents=True)
        beat.touch()
        os.utime(beat, (time.time() - age_s,) * 2)
    for name in ("run.json", "events.jsonl"):
        (tmp_path / "artifacts" / run / name).touch()
    for named in ("artifacts", run):
        shown = inside("watch", named, "--once", cwd=tmp_path)
        assert f"read long_run/run of {run} once; 0 anomalies" in shown.err, shown
    (tmp_path / "artifacts/latest").symlink_to(f"{run}/nvtx/run")
    shown = inside("watch", "--once", cwd=tmp_path)
    assert f"read nvtx/run of {run} once; 0 anomalies" in shown.err, shown


def of_a_plan(out: Path, run: str, name: str, *, kind: str = "trainer") -> None:
    """The same of a run that the runbook made."""
    folder = launched(out, f"{run}/{name}", kind=kind)
    (folder / "launch.json").write_text(json.dumps({"launch": {"kind": kind}}))


def test_the_launches_of_a_run_are_watched_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typed while the first launch of a run is to come: the link still names another run's."""
    of_a_plan(tmp_path, "r1", "production/leg1")
    for run in ("r1", "r2"):
        (tmp_path / run).mkdir(exist_ok=True)
        (tmp_path / run / "events.jsonl").touch()
    journal = (tmp_path / "r2/events.jsonl").open()
    fcntl.flock(journal, fcntl.LOCK_EX)
    coming = iter([("preflight/sanity", "pytest"), ("smoke/run", "trainer"), ("", "")])

    def go_on(_: float) -> None:
        name, kind = next(coming)
        if name:
            of_a_plan(tmp_path, "r2", name, kind=kind)
        else:
            journal.close()

    monkeypatch.setattr(live, "sleep", go_on)
    assert main(["watch", str(tmp_path / "latest"), "--interval", "0.1"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "warning" not in line]
    effect = "anomalies are only reported; --halt stops the run at one"
    assert [line for line in said if not line.startswith("ended")] == [
        f"watching {tmp_path}/latest; {effect}",
        "now production/leg1 of r1",
        "now smoke/run of r2",
        "the run is over; 0 anomalies, 2 rows read",
    ]


@pytest.mark.parametrize("linked", [False, True])
def test_nothing_is_waited_for_without_end(tmp_path: Path, linked: bool) -> None:
    if linked:
        (tmp_path / "run").mkdir()
        (tmp_path / "latest").symlink_to("run")
    with pytest.raises(UsageError, match=r"no run has begun in .* within 0\.2 s"):
        list(watched(tmp_path, interval_s=0.05, within_s=0.2, tell=lambda _: None))


def test_a_bare_name_that_is_none_is_not_waited_for_and_the_help_says_so(tmp_path: Path) -> None:
    assert "no run 'nowhere'" in inside("watch", "nowhere", cwd=tmp_path).err
    said = " ".join(inside("help", "watch", cwd=tmp_path).out.split())
    assert "waited for, five minutes at most; a bare name is there or a run's id" in said


@pytest.mark.executes("runbook stacks")
def test_stacks_of_an_empty_folder_name_no_file_that_is_not_there(tmp_path: Path) -> None:
    ended = inside("watch", "--stacks", ".", cwd=tmp_path)
    assert ended.code == 3
    assert ended.err == "no rank of . is alive: it has no heartbeat files\n"
    ended = inside("stacks", cwd=tmp_path)
    assert ended.err == "no rank of artifacts/latest is alive: there is no such folder\n"
