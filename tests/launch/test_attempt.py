"""An attempt of a pytest launch, and what its end means."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.read import read_launch
from runbook.records import LaunchStatus
from tests.launch.helpers import run, trainer


@pytest.mark.parametrize(
    ("body", "code", "status"),
    [
        ("def test_a(): pass", 0, LaunchStatus.COMPLETED),
        ("def test_a(): assert 0", 1, LaunchStatus.COMPLETED),
        ("", 5, LaunchStatus.COMPLETED),
        ("import nothing_of_that_name", 2, LaunchStatus.CRASHED),
        ("import os; os._exit(0)", 0, LaunchStatus.CRASHED),
    ],
    ids=["passes", "fails", "nothing there", "broken", "ends before its report"],
)
def test_pytest_is_completed_if_its_report_can_say_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, code: int, status: LaunchStatus
) -> None:
    # A configuration of the current folder that no pytest could work with must not matter.
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    monkeypatch.chdir(tmp_path)
    test = tmp_path / "test_one.py"
    test.write_text(body + "\n")
    launch = trainer("python", "-m", "pytest", "-q", str(test), kind="pytest", timeout_s=60)
    result = run(launch, tmp_path)
    assert (result.status, result.exit_code) == (status, code)
    evidence = read_launch(tmp_path, launch, result)
    if status is LaunchStatus.COMPLETED:
        assert evidence.junit is not None
        statuses = [case.status for case in evidence.junit.cases]
        assert statuses == {0: ["passed"], 1: ["failed"], 5: []}[code]
