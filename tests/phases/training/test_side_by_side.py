"""The shipped tests in two processes: both work, nothing is lost, and one that dies is no pass."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

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
    """pytest on two modules with these tests besides."""
    for name, mine, other, more in (("a", "A", "B", first), ("b", "B", "A", second)):
        text = WAITS.replace("MINE", mine).replace("OTHER", other) + more
        (folder / f"test_{name}.py").write_text(text)
    return run_all(folder)


def run_all(folder: Path) -> subprocess.CompletedProcess[str]:
    """pytest on the modules of a folder, as a launch calls it."""
    options = ["-c", "/dev/null", "-p", "no:cacheprovider", "-p", "nsa.tests.side_by_side"]
    command = [sys.executable, "-m", "pytest", "-q", *options, f"--junitxml={folder}/junit.xml"]
    return subprocess.run(
        [*command, str(folder)], capture_output=True, text=True, timeout=240, check=False
    )


def test_the_longest_module_does_not_come_last(tmp_path: Path) -> None:
    """Or one process works on it while the other has nothing left to do."""
    short = WAITS.replace("MINE", "SHORT").replace("OTHER", "LONG")
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text(short)
    long = WAITS.replace("MINE", "LONG").replace("OTHER", "SHORT") + "# so long\n" * 100
    (tmp_path / "test_c.py").write_text(long)
    ended = run_all(tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_two_processes_report_as_one(tmp_path: Path) -> None:
    ended = run(tmp_path, first=FAILS, second=FAILS)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    cases = {
        (case.get("classname", "").rpartition(".")[2], case.get("name")): case
        for case in ET.parse(tmp_path / "junit.xml").iter("testcase")
    }
    names = ("test_meets_the_other", "test_is_wrong")
    assert set(cases) == {(module, name) for module in ("test_a", "test_b") for name in names}
    for (_, name), case in cases.items():
        assert (case.find("failure") is not None) is (name == "test_is_wrong")
    assert "2 failed, 2 passed" in ended.stdout
    # What each failed test printed is told beside it, and not the other's.
    assert ended.stdout.count("Captured stdout call") == 2


@pytest.mark.parametrize("dying", ["first", "second"])
def test_a_process_that_dies_is_no_pass(tmp_path: Path, dying: str) -> None:
    dies = "\ndef test_dies():\n    os._exit(0)\n"
    ended = run(tmp_path, **{dying: dies})
    report = tmp_path / "junit.xml"
    assert ended.returncode != 0 or not report.exists(), ended.stdout
