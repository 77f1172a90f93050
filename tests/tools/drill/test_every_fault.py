"""Every kind of fault, injected for real once: noticed, named, with evidence, nothing left or lost.

Several launches run at a time here, so the seconds are checked loosely; the figures that are
promised are measured one at a time (docs/reliability.md).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runbook.tools.drill.faults import FAULTS, Fault
from runbook.tools.drill.runner import run_drill
from runbook.tools.drill.scene import DrillRow

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_CROWDED_S = 12.0


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DrillRow]:
    out = tmp_path_factory.mktemp("drill") / "all"
    jobs = min(4, (os.cpu_count() or 1) + 1)
    # The ones that mostly wait come first, so that the processors are not idle at the end.
    order = sorted(FAULTS.values(), key=_waits, reverse=True)
    report = run_drill(order, out, jobs=jobs)
    return {row.fault: row for row in report.rows}


def _waits(fault: Fault) -> float:
    return 20.0 if fault.name == "slow_phases" else fault.threshold_s


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAULTS)
def test_is_noticed(rows: dict[str, DrillRow], name: str) -> None:
    row = rows[name]
    problems = [text for text in row.problems if not text.startswith("took ")]
    assert problems == [], row
    if row.seconds is not None and row.limit_s is not None:
        assert row.seconds < row.limit_s + _CROWDED_S


def test_there_are_at_least_24_kinds() -> None:
    assert len(FAULTS) >= 24
    assert len({fault.title for fault in FAULTS.values()}) == len(FAULTS)


def test_a_good_drill_leaves_no_folder(tmp_path: Path) -> None:
    report = run_drill([FAULTS["exit"]], tmp_path / "d")
    assert report.ok
    assert list((tmp_path / "d").iterdir()) == []
    assert report.summary()["orphans"] == 0
