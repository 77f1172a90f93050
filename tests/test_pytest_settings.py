"""How the tests themselves are run: a report is the same without workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_a_junit_report_without_workers_holds_what_the_tests_recorded(tmp_path: Path) -> None:
    """Only the process that writes the report warns of properties, and a warning is an error."""
    report = tmp_path / "junit.xml"
    module = "nsa/tests/test_performance_guards.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"--junitxml={report}", module, "-k", "1x256x4 or noise"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (suite,) = ElementTree.parse(report).getroot()
    assert [suite.get(kind) for kind in ("tests", "errors", "failures")] == ["2", "0", "0"]
    recorded = {entry.get("name"): entry.get("value") for entry in suite.iter("property")}
    assert float(recorded["v1_over_v2_ratio_lower_99"] or 0.0) > 1.0
    assert "blocks" in recorded


_TIERS = """\
import pytest

@pytest.mark.slow
def test_of_the_long_tier():
    pass

def test_of_both():
    pass
"""


@pytest.mark.parametrize(
    ("words", "ended"),
    [
        ((), ["1 passed", "1 test left to the long tier: `make test-all` runs everything"]),
        (("-n1",), ["1 passed", "1 test left to the long tier: `make test-all` runs everything"]),
        (("--long",), ["2 passed"]),
        (("-m", "slow"), ["1 passed"]),
        (("::test_of_the_long_tier",), ["1 passed"]),
    ],
)
def test_the_long_tier_is_left_out_and_said_so_unless_asked_for(
    tmp_path: Path, words: tuple[str, ...], ended: list[str]
) -> None:
    (path := tmp_path / "test_tiers.py").write_text(_TIERS, encoding="utf-8")
    config = ("-c", str(ROOT / "pyproject.toml"), "--confcutdir", str(tmp_path))
    plugins = ("-p", "tests.conftest", "-p", "no:cacheprovider")
    named = [f"{path}{word}" for word in words if word.startswith("::")] or [str(path), *words]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *config, *plugins, *named],
        cwd=ROOT, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [text for text in ended if text not in done.stdout] == [], done.stdout
    assert ("long tier" in done.stdout) == (len(ended) > 1)
