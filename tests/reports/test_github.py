"""Annotations that GitHub's runner reads as they were meant, and nothing else as a command."""

from __future__ import annotations

import re

from reports.formats.terminal import render_github
from runbook.records import Check, Outcome, RunRecord
from runbook.records.run import Screen
from tests.factory.records import check
from tests.reports import samples

_COMMAND = re.compile(r"::(error|warning|notice) title=([^:,\r\n]*)::([^\r\n]*)")


def told_in(record: RunRecord) -> list[tuple[str, str, str]]:
    """Level, title and message of each command, unescaped as a runner does it."""
    found = []
    for line in render_github(record, Screen()).splitlines():
        match = _COMMAND.fullmatch(line)
        assert match, line
        level, title, message = match.groups()
        title = title.replace("%3A", ":").replace("%2C", ",")
        found.append((level, *(_plain(text) for text in (title, message))))
    return found


def _plain(text: str) -> str:
    return text.replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")


def with_checks(*checks: Check) -> RunRecord:
    record = samples.no_go()
    phase = record.phases[1].model_copy(update={"checks": checks})
    return record.model_copy(update={"phases": (record.phases[0], phase, *record.phases[2:])})


def failed(number: int, reason: str) -> Check:
    return check(
        f"baseline.row{number}",
        Outcome.FAIL,
        reason=reason,
        remedy=f"do {number}",
        evidence=(f"baseline/{number}.csv",),
        rerun="runbook run --phase baseline --profile cpu",
        required=True,
    )


def test_a_run_that_failed_has_an_error_with_what_to_do() -> None:
    level, title, message = told_in(samples.no_go())[0]
    assert level == "error" and title.startswith("FAIL ")
    assert "23 tok/s is below 39" in message
    assert "\nsee: baseline/launch_0/training.csv" in message
    assert "\ntry: " in message
    assert "\nnext: runbook run --phase baseline --profile a100x2_pcie4" in message


def test_github_is_never_given_more_than_it_shows() -> None:
    checks = [failed(number, f"fault {chr(97 + number)}") for number in range(20)]
    shown = told_in(with_checks(*checks))
    errors = [title for level, title, _ in shown if level == "error"]
    assert len(errors) <= 10
    if len(errors) == 10:
        assert errors[-1].endswith("more errors")
