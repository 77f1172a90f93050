"""A decision says its outcome to code; its reason is for people."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import runbook
from runbook.records import Outcome
from runbook.stats.decision import Decided

OURS = ("stats", "tools", "engine", "records", "cli")
CHOICES = {Decided.WINNER, Decided.TIE, Decided.KEEP, Decided.DROP}


@pytest.mark.parametrize("outcome", Decided)
def test_what_the_check_says(outcome: Decided) -> None:
    wanted = Outcome.PASS if outcome in CHOICES else Outcome[outcome.name]
    assert outcome.as_check is wanted


def test_nobody_reads_an_outcome_out_of_a_reason() -> None:
    """An optimizer setting was exported if a sentence began with KEEP."""
    parsed = re.compile(r"reason\.(startswith|partition|split|find|index)\(|in \w+\.reason\b")
    root = Path(runbook.__file__).parents[1]
    # The launcher reads the reason that a trainer of any make gives for its end: that is text.
    rooms = [root / name for name in ("phases", "reports", *map("runbook/{}".format, OURS))]
    found = [
        str(path)
        for room in rooms
        for path in room.rglob("*.py")
        if parsed.search(path.read_text("utf-8"))
    ]
    assert found == []
