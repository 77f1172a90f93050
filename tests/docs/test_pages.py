"""The first page and that of exports: their commands and names are the program's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from runbook.cli import COMMANDS
from runbook.cli._parser import parse_all
from runbook.tools.export import prometheus_text
from tests.docs.test_spec import ROOT
from tests.reports import samples

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exporting.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_every_command_on_the_page_is_taken() -> None:
    lines = re.findall(r"runbook (?:run|export|history)\b[^`;|\n]*", TEXT)
    assert len(lines) >= 5
    for line in lines:
        _, name, *words = shlex.split(line)
        assert parse_all(COMMANDS[name].parser(), words)[1] == [], line


def test_every_metric_on_the_page_is_written_and_the_other_way_round() -> None:
    record = samples.go()
    phases = tuple(
        one.model_copy(update={"started_at": record.started_at}) for one in record.phases
    )
    text = prometheus_text(record.model_copy(update={"phases": phases}))
    written = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    assert set(re.findall(r"\brunbook_\w+", TEXT)) == written


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_page_can_be_read_in_one_go() -> None:
    assert len(README.split()) <= 900
    assert len(re.findall(r"\]\(", README)) <= 25
    rows = re.findall(r"^\| `runbook", README, re.MULTILINE)
    assert len(rows) == 8


def test_commands_of_the_first_page_exist() -> None:
    named = re.findall(r"`runbook ([a-z]+)", README)
    assert set(named) <= set(COMMANDS) and len(set(named)) >= 8
