"""`runbook watch` refuses a directory in which no run will ever write, and names the right one."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from runbook.cli import live, main
from runbook.cli.live import begun_in
from runbook.errors import UsageError
from tests.cli.shell import inside


def test_the_folder_above_the_runs_is_refused_and_the_newest_run_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "20260101T000000Z-abc"
    run.mkdir()
    (tmp_path / "latest").symlink_to(run.name)
    assert main(["watch", str(tmp_path), "--halt", "1"]) == 2
    assert f"{tmp_path}/latest is" in capsys.readouterr().err


def test_the_folder_of_a_whole_run_is_refused_and_its_newest_launch_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, age_s in (("baseline/run1", 60), ("long_run/run", 5), ("nvtx/run", 90)):
        beat = tmp_path / "artifacts" / "20260101T000000Z-abc" / name / "heartbeat_rank0.jsonl"
        beat.parent.mkdir(parents=True)
        beat.touch()
        os.utime(beat, (time.time() - age_s,) * 2)
    newest = "20260101T000000Z-abc/long_run/run is\n"
    for folder in (tmp_path / "artifacts", tmp_path / "artifacts" / "20260101T000000Z-abc"):
        assert main(["watch", str(folder)]) == 2
        assert newest in capsys.readouterr().err


def test_once_on_nothing_says_so_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path), "--once"]) == 2
    assert "nothing to read:" in capsys.readouterr().err


@pytest.mark.executes("runbook watch")
def test_once_on_a_healthy_run_says_what_was_read(tmp_path: Path) -> None:
    (tmp_path / "training.csv").write_text("step,loss,lr,toks_per_s\n1,3.5,0.1,100.125\n")
    shown = inside("watch", str(tmp_path), "--once", cwd=tmp_path)
    assert shown.code == 0
    assert shown.out.startswith(f"{tmp_path}  no heartbeats\n")
    assert f"read {tmp_path} once; 0 anomalies, 1 rows read\n" in shown.err


def test_what_is_waited_for_is_said_before_the_first_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(live, "sleep", stop)
    assert main(["watch", str(tmp_path)]) == 130
    assert f"waiting for a run to begin in {tmp_path}, 300 s at most" in capsys.readouterr().err


def test_a_link_that_comes_later_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`watch OUT_DIR` before the run: a trainer by hand makes a folder below and links it."""

    def begin(_: float) -> None:
        """In the first pause of the watcher, which has seen an empty folder."""
        run = tmp_path / "20260101T000000Z-abc"
        run.mkdir()
        (run / "training.csv").write_text("step,loss,lr,toks_per_s\n1,nan,0.1,100.125\n")
        line = {"event": "exit", "token": "ab", "code": 0, "step": 1, "rank": 0}
        (run / "heartbeat_rank0.jsonl").write_text(json.dumps(line) + "\n")
        (tmp_path / "latest").symlink_to(run.name)

    monkeypatch.setattr(live, "sleep", begin)
    assert main(["watch", str(tmp_path), "--interval", "0.1"]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("nonfinite_loss")
    assert f"watching {tmp_path}/latest;" in shown.err


@pytest.mark.parametrize("linked", [False, True])
def test_nothing_is_waited_for_without_end(tmp_path: Path, linked: bool) -> None:
    if linked:
        (tmp_path / "run").mkdir()
        (tmp_path / "latest").symlink_to("run")
    with pytest.raises(UsageError, match=r"no run has begun in .* within 0\.2 s"):
        begun_in(tmp_path, interval_s=0.05, within_s=0.2)


def test_a_run_that_begins_in_the_folder_itself_is_waited_for(tmp_path: Path) -> None:
    later = threading.Timer(0.2, (tmp_path / "training.csv").touch)
    later.start()
    assert begun_in(tmp_path, interval_s=0.05, within_s=30) == tmp_path
    later.join()


def test_a_directory_that_is_not_there_is_called_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_a_run_that_is_named_by_its_id_is_found_for_the_reader(tmp_path: Path) -> None:
    (tmp_path / "artifacts" / "20260101T000000Z-abc").mkdir(parents=True)
    ended = inside("watch", "20260101T000000Z-abc", cwd=tmp_path)
    told = "no such directory: 20260101T000000Z-abc; artifacts/20260101T000000Z-abc is one\n"
    assert (ended.code, ended.err) == (2, f"runbook: error: {told}")


def test_stacks_of_an_empty_folder_name_no_file_that_is_not_there(tmp_path: Path) -> None:
    ended = inside("stacks", ".", cwd=tmp_path)
    assert ended.code == 3
    assert ended.err == "no rank of . is alive: it has no heartbeat files\n"
