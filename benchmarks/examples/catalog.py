"""Which runs there are: what is wrong in each, how it is started, and how it has to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, kw_only=True)
class Example:
    """One run. `profile` is what differs from `extends`, or the name of a shipped profile."""

    name: str
    title: str
    wrong: str
    exit_code: int
    profile: str = "cpu"
    changes: dict[str, Any] = field(default_factory=dict)
    gates: Sequence[str] = ()
    arguments: Sequence[str] = ()


EXAMPLES = tuple(
    Example(**item)
    for item in yaml.safe_load(Path(__file__).with_name("examples.yaml").read_text("utf-8"))
)
