"""The rehearsal: healthy machines are GO, sick ones are stopped by the rows that should stop them.

No GPU takes part: the evidence is generated. The whole table is `python -m benchmarks.rehearsal`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

import benchmarks.rehearsal as package
from benchmarks.rehearsal.__main__ import BEGIN, END, main, should, stops
from benchmarks.rehearsal.judged import judge
from benchmarks.rehearsal.machine import HEALTHY, MACHINES
from runbook.launch.local import LocalRun
from tests.tiers import by_tier

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks/results/rehearsal.md"
BY_NAME = {machine.name: machine for machine in MACHINES}
# Stopped before anything starts, so that each takes a second.
QUICK = ("driver_too_old", "slow_memory")
LATER = ("hot_gpu", "straggler", "leak_on_rank_1", "xid_48")
NAMES = (*QUICK, *LATER, *(machine.name for machine in HEALTHY))


def lines_of_the_page() -> dict[str, list[str]]:
    """The table's cells, by machine."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line]
    return {row[0].strip("`"): row for row in rows[2:]}


@pytest.mark.parametrize("name", by_tier(NAMES, QUICK.__contains__))
def test_a_healthy_machine_is_go_and_a_sick_one_stopped_by_the_row_that_should(name: str) -> None:
    """The page says of it what the command says of it."""
    result, row = judge(BY_NAME[name]), lines_of_the_page()[name]
    assert result.as_expected, (result.verdict, dict(result.reasons))
    if result.machine in HEALTHY:
        assert result.verdict == "GO" and not result.stopped_by and result.started >= 14
    assert row[3:6] == [should(result.machine), result.verdict, stops(result)]


def test_an_expectation_that_is_not_met_is_told_and_costs_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(BY_NAME["disk_full"], stopped_by=("preflight.pcie",))
    monkeypatch.setattr("benchmarks.rehearsal.__main__.MACHINES", (wrong,))
    assert main(["--workers", "1"]) == 1
    out = capsys.readouterr().out
    assert "BAD disk_full" in out and "should be: preflight.pcie" in out
    assert "nothing in it was measured" in out


def test_a_failure_of_the_runbook_itself_is_never_what_should_stop_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(self: LocalRun, start: object) -> None:
        raise AttributeError("planted")

    monkeypatch.setattr(LocalRun, "__init__", lost)
    result = judge(BY_NAME["xid_79"])
    assert set(result.machine.stopped_by) <= set(result.stopped_by)
    assert "HARNESS_ERROR" in {row.code.name for row in result.rows} and not result.as_expected


def test_the_page_has_every_machine_and_its_rows() -> None:
    rows = lines_of_the_page()
    assert list(rows) == [machine.name for machine in MACHINES]
    for machine in MACHINES:
        row = rows[machine.name]
        assert row[1:4] == [machine.profile, machine.story, should(machine)]
        assert (row[4] == "GO") == (not machine.stopped_by)
        assert set(machine.stopped_by) <= set(re.split(", ", row[5]))


READERS = "folder", "machine", "engine", "launch"
READS = ("phases", "reports", *(f"runbook.{name}" for name in READERS))


def test_what_makes_evidence_does_not_ask_what_reads_or_judges_it() -> None:
    for path in sorted(Path(package.__file__).parent.rglob("*.py")):
        if path.name == "judged.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not [n.module for n in nodes if (n.module or "").startswith(READS)], path.name
