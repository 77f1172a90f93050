"""facts.json: what was found out about the machine; a fact is a draft until its file is whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from nsa.contract import sha256_of
from runbook.errors import RunbookError
from runbook.files import read_bytes, write_atomic
from runbook.records.evidence import Fact

FACTS_FILE = "facts.json"
_FACTS = TypeAdapter(dict[str, Fact], config=ConfigDict(extra="forbid"))


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
            digests[draft.file] = sha256_of(run_root / draft.file)
        facts[draft.name] = Fact(
            name=draft.name,
            value=draft.value,
            unit=draft.unit,
            path=draft.file,
            sha256=digests[draft.file],
            note=draft.note,
        )
    return facts


def write_facts(run_root: Path, facts: Mapping[str, Fact]) -> None:
    """Keep what was found out about the machine, for judging again."""
    document = {name: asdict(fact) for name, fact in facts.items()}
    write_atomic(run_root / FACTS_FILE, json.dumps(document, indent=2) + "\n")


def read_facts(run_root: Path) -> dict[str, Fact]:
    """The facts of a run; none if preflight did not run. Raises `RunbookError` if damaged."""
    path = run_root / FACTS_FILE
    if not path.is_file():
        return {}
    try:
        return _FACTS.validate_json(read_bytes(path), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RunbookError(f"{path} is damaged: {where}: {first['msg']}") from error


def shown_fact(fact: Fact) -> str:
    """A fact as the record's environment shows it; empty where nothing is known."""
    if fact.value in (None, ""):
        return ""
    value = f"{fact.value:.6g}" if isinstance(fact.value, float) else str(fact.value)
    return f"{value} {fact.unit}".strip()
