"""How the tests themselves are run: a report is the same without workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

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
