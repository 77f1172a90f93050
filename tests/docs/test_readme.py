"""The first page stays short, its commands exist, and its picture is whole."""

from __future__ import annotations

import re

from runbook.cli import COMMANDS
from tests.docs.test_spec import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_can_be_read_in_one_go() -> None:
    assert len(TEXT.split()) <= 900
    assert len(re.findall(r"\]\(", TEXT)) <= 25
    rows = re.findall(r"^\| `runbook", TEXT, re.MULTILINE)
    assert len(rows) == 8


def test_its_commands_exist() -> None:
    named = re.findall(r"`runbook ([a-z]+)", TEXT)
    assert set(named) <= set(COMMANDS) and len(set(named)) >= 8
