"""What rank 0 says of each step of a run that is watched, from the file that there is.

Heartbeats repeat what training.csv says, so a run whose CSV is off is not watched blindly.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nsa.contract import HEARTBEATS, TRAINING_CSV, Event
from runbook.folder.heartbeats import parse_heartbeat
from runbook.folder.launch import LEGACY_COLUMNS
from runbook.folder.lines import LineTail, TableTail

_SAID = ("step", "loss", "grad_norm", "toks_per_s")
_MEMORY = "mem_mib"


class Readings:
    """New rows of training.csv; while there is none, rank 0's `progress` heartbeats as such rows.

    `path` is the file that the last row came from, None before the first.
    """

    def __init__(self, run_dir: Path) -> None:
        self._table = TableTail(run_dir / TRAINING_CSV, headerless=LEGACY_COLUMNS)
        self._beats = LineTail(run_dir / HEARTBEATS.name(0))
        self._memory: str | None = None
        self._told = 0.0
        self.path: Path | None = None
        self.rows_read = 0

    def rows(self) -> Iterator[dict[str, str]]:
        """The rows that have been completed since the last call, each step once."""
        source = self._table if self._table.path.exists() else self._beats
        rows = self._table.rows() if source is self._table else self._progress()
        for row in rows:
            # A CSV that comes late begins with steps that the heartbeats have told.
            if source is self._table and self._told and not step_of(row) > self._told:
                continue
            if source is self._beats:
                self._told = max(self._told, step_of(row))
            self.path = source.path
            self.rows_read += 1
            yield row

    def _progress(self) -> Iterator[dict[str, str]]:
        for line in self._beats.lines():
            beat = parse_heartbeat(line) or {}
            event = beat.get("event", beat.get("msg"))
            if event == Event.STEP_END and beat.get(_MEMORY) is not None:
                self._memory = str(beat[_MEMORY])
            if event == Event.PROGRESS:
                row = {name: str(beat[name]) for name in _SAID if beat.get(name) is not None}
                yield row if self._memory is None else row | {_MEMORY: self._memory}


def step_of(row: dict[str, str]) -> float:
    """The row's step; 0 where it has none, which no detector takes either."""
    try:
        return float(row["step"])
    except (KeyError, ValueError):
        return 0.0
