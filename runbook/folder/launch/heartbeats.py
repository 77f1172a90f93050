"""heartbeat_rank*.jsonl: its files, its lines, and what one line says, for whoever reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from nsa.contract import HEARTBEATS, Event, ExitCode
from runbook.files import LARGEST_LOG_BYTES
from runbook.folder.launch.lines import LONGEST_LINE
from runbook.folder.launch.shapes import is_count

STEPPING = frozenset({Event.STEP_START, Event.STEP_END, Event.PROGRESS})
_KNOWN = frozenset(Event)
# No training has as many steps; a larger number may not be exact in a float64.
MOST_STEPS = 2**53


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a rank said that it ended."""

    code: int
    reason: str
    steps_done: int | None

    @classmethod
    def told_by(cls, record: Mapping[str, Any]) -> Exit:
        """The end in an exit record. One that cannot say its code is no good exit."""
        code = whole_number(record.get("code"))
        return cls(
            code=ExitCode.CRASH if code is None else code,
            reason=str(record.get("reason") or ""),
            steps_done=whole_number(record.get("steps_done")),
        )


def heartbeat_files(run_dir: Path) -> dict[int, Path]:
    """The heartbeat files of a run directory, by rank."""
    return HEARTBEATS.found_in(run_dir)


def heartbeats_in(path: Path) -> Iterator[Mapping[str, Any]]:
    """The readable records of a file, one by one. Raises `OSError`."""
    with path.open("rb") as stream:
        while (line := stream.readline(LONGEST_LINE)) and stream.tell() <= LARGEST_LOG_BYTES:
            record = parse_heartbeat(line) if line.endswith(b"\n") else None
            if record is not None:
                yield record


def parse_heartbeat(line: bytes) -> Mapping[str, Any] | None:
    """The record of a complete line, or None if it is no JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def parse_heartbeats(lines: Sequence[bytes]) -> list[Mapping[str, Any] | None]:
    """The records of many lines, as `parse_heartbeat` has each of them."""
    try:
        # It takes a third of the time, but no text that is not Unicode, as a path may be.
        found = list(map(from_json, lines))
    except ValueError:
        return list(map(parse_heartbeat, lines))
    return [record if isinstance(record, dict) else None for record in found]


def event_of(record: Mapping[str, Any]) -> str | None:
    """The event that a record tells, by either name that trainers have for it; None for none."""
    event = record["event"] if "event" in record else record.get("msg")
    return event if isinstance(event, str) else None


def step_of(record: Mapping[str, Any]) -> int | None:
    """The step that a record tells; None for what no training can have done."""
    step = whole_number(record.get("step"))
    return step if step is not None and 0 <= step < MOST_STEPS else None


def is_of_training(event: str | None) -> bool:
    """Whether an event tells the step of the training: also one of another trainer's own."""
    return event in STEPPING or event not in _KNOWN


def whole_number(value: object) -> int | None:
    """The value if it is an integer of 64 bits; JSON's true and false are none."""
    return value if isinstance(value, int) and is_count(value) else None
