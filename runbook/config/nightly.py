"""What the nightly compares with: one small file, changed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from nsa.settings import load_strict
from runbook.errors import UsageError
from runbook.files import data_path, read_given
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
    try:
        document, problems = load_strict(read_given(path).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {reason}") from error
    if problems:
        raise UsageError([f"{path}: {text}" for text in problems])
    try:
        return Nightly.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        found = [
            f"{path}: {'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}"
            for one in error.errors()
        ]
        hint = "allowed are schema_version, reference (40 hex digits), profile and why"
        raise UsageError(found, hint=hint) from error
