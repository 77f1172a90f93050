"""`make gpu` on a CPU: its stages with small shapes, and how a session is cut and resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_session import __main__ as gpu_session
from benchmarks.gpu_session import session as sessions
from benchmarks.gpu_session.__main__ import main
from benchmarks.gpu_session.stages import End, Place, Program, Stage, Status, by_code, judge_tests
from tests.shared import crowded, gone

ENDS_BADLY = """\
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def stage(name: str, *codes: str, limit_s: float = 60) -> Stage:
    """A stage of lines of Python."""
    return Stage(
        name=name,
        title=f"a test of {name}",
        limit_s=limit_s,
        programs=lambda _place: [
            Program(log=f"{number}.log", words=(sys.executable, "-c", code))
            for number, code in enumerate(codes)
        ],
        judge=by_code,
    )


def session(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *stages: Stage, more: tuple[str, ...] = ()
) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and how each stage stands afterwards."""
    monkeypatch.setattr(gpu_session, "STAGES", stages)
    code = main(["--stand-in", "--out", str(folder), *more])
    document = json.loads((folder / "STAND-IN" / "summary.json").read_text())
    page = (folder / "STAND-IN" / "summary.md").read_text()
    assert page.startswith("# GPU session on STAND-IN\n\n**STAND-IN: no GPU.")
    stages_now: dict[str, dict[str, Any]] = document["stages"]
    assert all(f"| {name} | {one['status']} |" in page for name, one in stages_now.items())
    return code, stages_now


def test_what_passed_is_not_repeated_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = stage("good", "print('first')", "print('done')")
    for _ in range(2):
        code, found = session(tmp_path, monkeypatch, good)
        assert (code, found["good"]["status"], found["good"]["parts"]) == (0, "PASS", 1)
    assert found["good"]["says"] == "done" and len(found["good"]["commit"]) == 40
    _, found = session(tmp_path, monkeypatch, good, more=("--again",))
    assert found["good"]["parts"] == 1
    assert (tmp_path / "STAND-IN" / "good.earlier-1" / "0.log").read_text() == "first\n"


def test_a_stage_out_of_time_is_ended_with_all_its_processes_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_TOO_LITTLE_S", 0.1)
    slow = stage("slow", ENDS_BADLY, "print('never')", limit_s=crowded(3.0))
    code, found = session(tmp_path, monkeypatch, slow)
    assert (code, found["slow"]["status"]) == (3, "CUT OFF")
    log = tmp_path / "STAND-IN" / "slow" / "0.log"
    left = [int(pid) for pid in log.read_text().split()]
    assert len(left) == 2 and gone(*left, within_s=crowded(10.0))
    assert not (log.parent / "1.log").exists()
    _, found = session(tmp_path, monkeypatch, stage("slow", "print('done')"))
    assert (found["slow"]["status"], found["slow"]["parts"]) == ("PASS", 2)


PASSES = "<testcase classname='a' name='b'/>"


@pytest.mark.parametrize(("cases", "code", "status", "says"), [
    (PASSES, 0, Status.PASS, "2 passed, 0 failed, 0 skipped"),
    ("", 0, Status.UNDECIDED, "1 passed"),
    ("<testcase classname='a' name='b'><skipped/></testcase>", 0, Status.UNDECIDED, "1 skipped"),
    ("<testcase classname='a' name='b'><failure/></testcase>", 1, Status.FAIL, "1 failed"),
    (PASSES, 1, Status.FAIL, "b.log, exit code 1: Timeout!"),
    (None, 1, Status.FAIL, "1 passed, 0 failed, 0 skipped: b.log, exit code 1: Timeout!"),
])  # fmt: skip
def test_only_tests_that_ran_are_passed(
    tmp_path: Path, cases: str | None, code: int, status: Status, says: str
) -> None:
    """Of two files, the first of which passes; the second may hang and leave no report."""
    for name, inside in (("a", PASSES), ("b", cases)):
        if inside is not None:
            report = f"<testsuites><testsuite>{inside}</testsuite></testsuites>"
            (tmp_path / f"{name}.xml").write_text(report)
    (tmp_path / "b.log").write_text("Timeout!\n")
    ends = [End(code=0, log=tmp_path / "a.log"), End(code=code, log=tmp_path / "b.log")]
    found, text = judge_tests(Place(folder=tmp_path, stand_in=True, told_s=1), ends)
    assert found is status and says in text


@pytest.mark.slow
@pytest.mark.e2e
def test_every_stage_for_real_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["--stand-in", "--out", str(tmp_path)]) == 0
    folder = tmp_path / "STAND-IN"
    found = json.loads((folder / "summary.json").read_text())["stages"]
    assert found["tests"]["says"].startswith("1 passed")
    assert found["run"]["says"].startswith("PARTIAL PASS")
    assert "PyTorch version:" in (folder / "device" / "collect_env.txt").read_text()
    rows = json.loads((folder / "attention" / "result.json").read_text())["rows"]
    rows = [row for row in rows if not row["arm"].startswith("peer ")]
    assert [row["seq_len"] for row in rows] == [256, 256, 512, 512]
    assert all(row["right"] for row in rows)
    (record,) = folder.glob("run/runs/2*/run.json")
    assert json.loads(record.read_text())["command"].startswith("runbook run ")
    assert "\n## attention\n" in (folder / "summary.md").read_text()
    assert "| 256 | dense |" in (folder / "step" / "step.md").read_text()
