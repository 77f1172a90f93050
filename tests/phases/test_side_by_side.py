"""The shipped tests in two processes: both work, nothing is lost, and one that dies is no pass."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

# Each module waits for the other's process: one after the other they would wait for good.
WAITS = """
import os, pathlib, time
def test_meets_the_other():
    here = pathlib.Path(__file__).parent
    (here / "MINE").touch()
    end = time.monotonic() + 60
    while not (here / "OTHER").exists():
        assert time.monotonic() < end, "the other module does not run meanwhile"
        time.sleep(0.01)
"""
FAILS = """
def test_is_wrong():
    print('said before')
    assert 'left' == 'right'
"""


def run(folder: Path, *, first: str = "", second: str = "") -> subprocess.CompletedProcess[str]:
    """pytest on two modules with these tests besides, as a launch calls it."""
    for name, mine, other, more in (("a", "A", "B", first), ("b", "B", "A", second)):
        text = WAITS.replace("MINE", mine).replace("OTHER", other) + more
        (folder / f"test_{name}.py").write_text(text)
    options = ["-c", "/dev/null", "-p", "no:cacheprovider", "-p", "nsa.tests.side_by_side"]
    command = [sys.executable, "-m", "pytest", "-q", *options, f"--junitxml={folder}/junit.xml"]
    return subprocess.run(
        [*command, str(folder)], capture_output=True, text=True, timeout=240, check=False
    )


def test_two_processes_report_as_one(tmp_path: Path) -> None:
    ended = run(tmp_path, first=FAILS, second=FAILS)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    cases = ET.parse(tmp_path / "junit.xml").iter("testcase")
    told = sorted((one.get("name"), one.find("failure") is not None) for one in cases)
    assert told == [("test_is_wrong", True)] * 2 + [("test_meets_the_other", False)] * 2
    assert "2 failed, 2 passed" in ended.stdout
    # What each failed test printed is told beside it, and not the other's.
    assert ended.stdout.count("Captured stdout call") == 2


def test_a_process_that_dies_is_no_pass(tmp_path: Path) -> None:
    ended = run(tmp_path, second="\ndef test_dies():\n    os._exit(0)\n")
    report = tmp_path / "junit.xml"
    assert ended.returncode != 0 or not report.exists(), ended.stdout
