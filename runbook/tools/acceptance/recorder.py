"""A pytest plugin: one JSON line for each test as it ends, and none twice that has passed.

Loaded by `-p runbook.tools.acceptance.recorder`; the file is named by a variable (`tests`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.tools.acceptance.program import append_line, read_lines
from runbook.tools.acceptance.tests import TESTS_VARIABLE, last_ends

if TYPE_CHECKING:
    import pytest

_SHOWN = 500


def _file() -> Path:
    return Path(os.environ[TESTS_VARIABLE])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has passed in an earlier part."""
    ends = last_ends(read_lines(_file()))
    done = [i for i in items if ends.get(i.nodeid, {}).get("outcome") == "passed"]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item not in done]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a test's end: of its call, or of a setup or teardown that did not pass."""
    if report.when != "call" and report.outcome == "passed":
        return
    reason = ""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2])
    elif report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(getattr(crash, "message", report.longrepr))[:_SHOWN]
    append_line(
        _file(),
        {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 3),
            "reason": reason,
        },
    )
