"""The contract of a report: a run record in, text out. Nothing in a report measures or judges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runbook.records.run import RunRecord


@dataclass(frozen=True, kw_only=True)
class Screen:
    """How a report is shown to a person; a file is written with the defaults.

    `color`: escape codes are welcome. `location`: the run's folder as the reader would type it.
    `brief`: only what is left to say where the phases were shown while they ran.
    """

    color: bool = False
    location: str = ""
    brief: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """One format, found through the entry points of the group `runbook.reports`.

    `file_name` is where a run keeps it; `render` is a pure function of the record, and of the
    screen if it is made for one. Raises nothing for what a record holds.
    """

    file_name: str
    render: Callable[[RunRecord, Screen], str]

    def text(self, record: RunRecord, screen: Screen | None = None) -> str:
        """The rendered report."""
        return self.render(record, screen or Screen())
