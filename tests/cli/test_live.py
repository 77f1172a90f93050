"""`runbook watch` refuses a directory in which no run will ever write, and names the right one."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from runbook.cli import live, main
from runbook.cli.live import begun_in
from runbook.errors import UsageError


def test_the_folder_above_the_runs_is_refused_and_the_newest_run_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "20260101T000000Z-abc"
    run.mkdir()
    (tmp_path / "latest").symlink_to(run.name)
    assert main(["watch", str(tmp_path), "--halt", "1"]) == 2
    assert f"{tmp_path}/latest is" in capsys.readouterr().err


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
