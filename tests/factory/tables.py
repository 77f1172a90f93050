"""Cases that are data: tables in `tables.yaml` beside a test, with a column for each argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml


def rows(file: str, name: str) -> list[dict[str, Any]]:
    """The table of this name beside the test's `file`."""
    text = Path(file).with_name("tables.yaml").read_text("utf-8")
    found: list[dict[str, Any]] = yaml.safe_load(text)[name]
    return found


def table(file: str, name: str) -> pytest.MarkDecorator:
    """The same, each row as a case of the test."""
    columns, found = list(rows(file, name)[0]), rows(file, name)
    return pytest.mark.parametrize(columns, [[row[column] for column in columns] for row in found])
