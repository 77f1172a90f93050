"""A run that goes on is told as that by every command that reads runs, and has no verdict yet."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.folder.journal import Journal, is_going_on, phases_done
from tests.engine.test_history import store
from tests.engine.test_trends import at

RUN = "20261101T000000Z-abc1234"
SAID = f"{RUN}: RUNNING, 1 of 2 phases, now smoke/run; runbook watch "


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A run whose record so far lies there already."""
    store(tmp_path, RUN, at(40.0))
    with Journal.create(tmp_path / RUN) as journal:
        journal.append("run_started", phases=["preflight", "smoke"])
        journal.append("phase_finished", phase="preflight", interrupted=False)
        journal.append("launch_started", phase="smoke", launch="run")
    return tmp_path


@pytest.mark.parametrize("words", [("report",), ("verify",), ("history",)])
def test_a_run_that_goes_on_is_running_and_no_verdict(
    live: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    with Journal.reopen(live / RUN):
        code = main([*words, "--out", str(live)])
        shown = capsys.readouterr()
    assert "RUNNING" in shown.out and "GO" not in shown.out, shown
    if words != ("history",):
        assert code == 3 and shown.out.startswith(SAID) and len(shown.out.splitlines()) == 1
    main([*words, "--out", str(live)])
    assert "RUNNING" not in capsys.readouterr().out


def test_programs_are_told_so_too(live: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal.reopen(live / RUN):
        assert main(["verify", "--json", "--out", str(live)]) == 3
        assert json.loads(capsys.readouterr().out)["ok"] is False
        assert main(["report", "--format", "md", "--out", str(live)]) == 3
        shown = capsys.readouterr()
        assert shown.err.startswith(SAID) and shown.out.startswith("# ")
        main(["history", "--json", "--out", str(live)])
        (row,) = json.loads(capsys.readouterr().out)["runs"]
        assert row["verdict"] == "RUNNING"


def test_another_look_at_the_same_time_is_no_run_that_goes_on(live: Path) -> None:
    with (live / RUN / "events.jsonl").open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        assert not is_going_on(live / RUN)


def test_a_phase_that_is_run_again_is_not_done() -> None:
    begun, done = {"event": "run_started", "phases": ["a", "b"]}, {"event": "phase_finished"}
    assert phases_done([begun, done, done]) == "2 of 2 phases"
    assert phases_done([begun, done, done, {"event": "phase_repeated"}]) == "1 of 2 phases"
