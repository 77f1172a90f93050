"""One spelling of a unit in everything that is shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nsa.contract import TRAINING_COLUMNS
from runbook.records.measurement import TOKENS_PER_SECOND

ROOT = Path(__file__).parents[2]
SHOWN = ("nsa", "runbook", "phases", "reports", "templates", "configs", "docs")
OTHER_SPELLINGS = re.compile(r"\b(toks/s|tokens/s)")


@pytest.mark.parametrize("folder", SHOWN)
def test_throughput_has_one_unit(folder: str) -> None:
    files = [
        path
        for suffix in ("*.py", "*.md", "*.yaml", "*.j2")
        for path in (ROOT / folder).rglob(suffix)
    ]
    wrong = [str(path) for path in files if OTHER_SPELLINGS.search(path.read_text("utf-8"))]
    assert wrong == []


def test_the_trainers_column_has_that_unit() -> None:
    units = {column.name: column.unit for column in TRAINING_COLUMNS}
    assert units["toks_per_s"] == TOKENS_PER_SECOND
