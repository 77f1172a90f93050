"""How the tests themselves are run: reports without workers, shared launches with them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARING = """\
import pytest

@pytest.fixture(scope="module")
def launch():
    with open({made!r}, "a") as file:
        file.write("made\\n")

@pytest.mark.parametrize("number", range(8))
def test_of_the_launch(launch, number):
    pass
"""


def run_pytest(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_junit_report_without_workers_holds_what_the_tests_recorded(tmp_path: Path) -> None:
    """Only the process that writes the report warns of properties, and a warning is an error."""
    report = tmp_path / "junit.xml"
    module = "nsa/tests/test_performance_guards.py"
    run_pytest(ROOT, "-p", "no:xdist", f"--junitxml={report}", module, "-k", "1x256x4 or noise")
    (suite,) = ElementTree.parse(report).getroot()
    assert [suite.get(kind) for kind in ("tests", "errors", "failures")] == ["2", "0", "0"]
    recorded = {entry.get("name"): entry.get("value") for entry in suite.iter("property")}
    assert float(recorded["v1_over_v2_ratio_lower_99"] or 0.0) > 1.0
    assert {"device", "blocks"} <= set(recorded)


@pytest.mark.parametrize(("together", "times"), [(True, 1), (False, 2)])
def test_tests_that_share_a_fixture_go_to_one_worker(
    tmp_path: Path, together: bool, times: int
) -> None:
    made = tmp_path / "made"
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_sharing.py").write_text(SHARING.format(made=str(made)))
    if together:
        shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    run_pytest(tmp_path, "-n2", "--dist", "loadgroup")
    assert made.read_text() == "made\n" * times
