"""A fact that is noted: what every collector does.

A fact is a draft until the file that it was read from is whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from runbook.records.evidence import Fact


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A fact whose file may still grow. None needs a note that says why there is no value."""

    name: str
    value: str | float | bool | None
    file: str
    unit: str = ""
    note: str = ""


def finish(drafts: Iterable[Draft], run_root: Path) -> dict[str, Fact]:
    """Facts with the digest of the file that holds them.

    Raises RuntimeError for a name that occurs twice, or a missing value without its reason.
    """
    facts: dict[str, Fact] = {}
    digests: dict[str, str] = {}
    for draft in drafts:
        if draft.name in facts:
            raise RuntimeError(f"two facts are called {draft.name}")
        if draft.value is None and not draft.note:
            raise RuntimeError(f"fact {draft.name} has no value and no note that says why")
        if draft.file not in digests:
            content = (run_root / draft.file).read_bytes()
            digests[draft.file] = hashlib.sha256(content).hexdigest()
        facts[draft.name] = Fact(
            name=draft.name,
            value=draft.value,
            unit=draft.unit,
            path=draft.file,
            sha256=digests[draft.file],
            note=draft.note,
        )
    return facts
