"""What the phases share: rows that cannot vanish, launches, and the guards on evidence.

The tables beside the modules have questions, remedies, and rules that never change.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from nsa.strict_yaml import load_strict


@cache
def table(name: str) -> dict[str, Any]:
    """The document `NAME.yaml`, read once."""
    document, problems = load_strict((files("phases.kit") / f"{name}.yaml").read_text("utf-8"))
    assert not problems, problems  # noqa: S101 - the file is ours
    found: dict[str, Any] = document
    return found
