"""A launch on another torch, CUDA, NCCL or driver than preflight found is not the one planned."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runbook.records import Outcome
from tests.phases import builder, env_files, spoil
from tests.phases.answers import FINE, OTHERWISE, WHERE, says
from tests.phases.spoil import Change, at

CPU = builder.context("cpu")


def planned(
    change: Change | None, phase: str = "baseline", where: Any = WHERE, **facts: Any
) -> Any:
    """Row `as_planned` in a run with preflight, in which the last launch is changed."""
    name = builder.PHASES[phase].plan(where)[-1].name
    found = builder.evidence(phase, where, change=change, only=[name])
    known = {one: value for one, value in facts.items() if "." not in one}
    seen = builder.facts(**known)
    seen |= {n: replace(seen["git.sha"], name=n, value=v) for n, v in facts.items() if "." in n}
    return builder.row(phase, "as_planned", replace(found, facts=seen), where)


def ran_on(**versions: Any) -> Change:
    return spoil.env(versions=versions)


@pytest.mark.parametrize("phase", builder.TRAINING)
def test_another_version_in_any_phase_is_named_and_decides(phase: str) -> None:
    assert planned(None, phase).outcome is Outcome.PASS
    check = planned(ran_on(torch="2.9.1"), phase)
    says(check, OTHERWISE, "torch: preflight saw 2.13.0, it ran on 2.9.1")
    assert check.required


BARE = {"where": CPU, **dict.fromkeys(("torch_cuda", "torch_nccl", "gpu_driver"))}


@pytest.mark.parametrize(
    ("change", "wanted", "text", "options"),
    [
        (ran_on(cuda="12.8"), OTHERWISE, "cuda: preflight saw 13.0, it ran on 12.8", {}),
        (ran_on(nccl="2.21.5"), OTHERWISE, "nccl: preflight saw 2.27.7, it ran on 2.21.5", {}),
        (ran_on(driver="550"), OTHERWISE, "driver: preflight saw 580.95.05, it ran on 550", {}),
        (ran_on(torch=None), OTHERWISE, "torch: preflight saw 2.13.0, it ran on None", {}),
        (ran_on(nccl=None), OTHERWISE, "nccl: preflight saw 2.27.7, it ran on None", {}),
        (at("devices_before", driver="550.54"), OTHERWISE,
         "driver: preflight saw 580.95.05, the launch began with 550.54", {}),
        # A container may hide the driver's file; on a CPU a trainer need not tell.
        (ran_on(driver=None), FINE, "", {}),
        (ran_on(torch=None), FINE, "", BARE),
        (ran_on(torch="2.9.1"), OTHERWISE, "", BARE),
    ],
)  # fmt: skip
def test_each_version_has_its_second_source(
    change: Change, wanted: Any, text: str, options: dict[str, Any]
) -> None:
    says(planned(change, **options), wanted, text)


PACKAGE = env_files.package(builder.PHASES["baseline"].plan(WHERE)[0])
ITS = {f"package.{name}": text for name, text in PACKAGE.items()}
OURS = replace(WHERE, package="0" * 12, package_path="/ours/nsa")
PATHS, LEAVE = "PYTHONPATH", "leave the code as it is while a run goes on"


@pytest.mark.parametrize(
    ("where", "facts", "remedy", "text", "not_in"),
    [
        # A folder `nsa` where the run was started, or on PYTHONPATH, comes before ours.
        (WHERE, {**ITS, "package.path": "/elsewhere/nsa"}, PATHS,
         f"two folders: the harness has /elsewhere/nsa, the launch ran {PACKAGE['path']}", "x x"),
        (WHERE, {**ITS, "package.sha256": "e" * 64}, "",
         f"package.sha256: preflight saw {'e' * 64}, it ran ", PATHS),
        # Without preflight: nobody changed code, and the remedy says what to unset.
        (OURS, {}, PATHS, f"the harness has /ours/nsa, the launch ran {PACKAGE['path']}",
         "code was changed"),
        (replace(OURS, package_path=PACKAGE["path"]), {}, LEAVE, "code was changed", PATHS),
    ],
)  # fmt: skip
def test_another_package_than_the_harness_saw_is_named_and_decides(
    where: Any, facts: dict[str, str], remedy: str, text: str, not_in: str
) -> None:
    check = says(planned(None, where=where, **facts), OTHERWISE, text, remedy=remedy)
    assert not_in not in check.reason + check.remedy


def test_the_same_package_from_another_folder_is_the_one_planned() -> None:
    where = replace(OURS, package=PACKAGE["sha256"][:12])
    assert planned(None, where=where).outcome is Outcome.PASS


# The shipped tests in two processes: both work, nothing is lost, and one that dies is no pass.

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
