"""What the nightly compares with: one small file, changed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from runbook.config.extends import read_mapping, validated
from runbook.files import data_path
from runbook.records.measurement import Record


class Nightly(Record):
    """The pinned reference commit in full, the profile, and why this commit."""

    schema_version: Literal[1]
    reference: str = Field(pattern=r"^[0-9a-f]{40}$")
    profile: str = Field(min_length=1)
    why: str = Field(min_length=1)


def load_nightly(path: Path | None = None) -> Nightly:
    """The pin in a file, or the shipped one. Raises UsageError with everything that is wrong."""
    path = path or data_path("configs") / "nightly.yaml"
    return validated(Nightly, read_mapping("nightly", path), str(path))
