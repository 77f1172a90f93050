"""What differs between two records of the same phase, in words that name the place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from runbook.records import PhaseRecord

__all__ = ["compare_phases", "differing_fields"]

_LONGEST = 120


def compare_phases(recorded: PhaseRecord, recomputed: PhaseRecord) -> list[str]:
    """One line for everything in `recorded` that the artifacts do not give."""
    problems: list[str] = []
    old, new = recorded.model_dump(mode="json"), recomputed.model_dump(mode="json")
    problems += _rows(recorded.name, "check", old.pop("checks"), new.pop("checks"), "id")
    problems += _rows(
        recorded.name, "measurement", old.pop("measurements"), new.pop("measurements"), "name"
    )
    problems += _rows(recorded.name, "table", old.pop("tables"), new.pop("tables"), "title")
    problems += _rows(recorded.name, "series", old.pop("series"), new.pop("series"), "name")
    problems += [f"{recorded.name}.{text}" for text in differing_fields(old, new)]
    return problems


def _rows(
    phase: str, kind: str, old: list[dict[str, Any]], new: list[dict[str, Any]], key: str
) -> Iterator[str]:
    names = [row[key] for row in old]
    if names != [row[key] for row in new]:
        theirs = {row[key] for row in new}
        extra = [name for name in names if name not in theirs]
        absent = [row[key] for row in new if row[key] not in names]
        yield (
            f"{phase}: {kind}s differ: recorded but not in the artifacts {extra}, "
            f"in the artifacts but not recorded {absent}"
        )
        return
    for one, other in zip(old, new, strict=True):
        where = one[key] if kind == "check" else f"{phase}: {kind} {one[key]!r}"
        for text in differing_fields(one, other):
            yield f"{where}: {text}"


def differing_fields(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`field: recorded X, recomputed Y` for every leaf that differs."""
    problems = []
    for name in sorted(old.keys() | new.keys()):
        one, other = old.get(name), new.get(name)
        if json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True):
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            problems += differing_fields(one, other, f"{prefix}{name}.")
        else:
            problems.append(f"{prefix}{name}: recorded {_short(one)}, recomputed {_short(other)}")
    return problems


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
