"""One spelling of a unit in everything that is shown."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from reports.text import value_text
from runbook.records.measurement import (
    Measurement,
    Scalar,
    json_ready,
    plain_number,
)

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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "NaN"),
        (-math.inf, "-Infinity"),
        (847.24, "847.2"),
        (12_345.6, "12346"),
        (12_345, "12345"),
        (True, "yes"),
        (None, "-"),
        ("2.13.0", "2.13.0"),
    ],
)
def test_a_number_has_one_spelling_everywhere(value: Scalar | None, text: str) -> None:
    """It was nan in a report, NaN in its JSON and -inf in the JSON of inspect."""
    assert plain_number(value) == text
    if value is None:
        return
    measured = Measurement(
        name="x", value=value, unit="", n=1, window=None, path="a.csv", sha256="0" * 64
    )
    assert str(measured) == f"{text} (n=1, a.csv)"
    assert value_text(measured) == text
    if isinstance(value, float) and not math.isfinite(value):
        assert json_ready({"rows": (value,)}) == {"rows": [text]}
        assert json.loads(measured.model_dump_json())["value"] == text
