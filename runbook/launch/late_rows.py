"""Rows that rank 0 says it has written, and that are not in their file yet.

A row comes before the heartbeat that tells of it. So whoever reads the heartbeat first and the file
then finds the row there, however busy the machine is; a trainer that keeps its rows in memory
loses them when it is killed.
"""

from __future__ import annotations

import math
from pathlib import Path

from nsa.contract import TRAINING_CSV, VAL_CSV, Event
from runbook.folder.launch import LEGACY_COLUMNS
from runbook.folder.lines import TableTail
from runbook.launch.ranks import RankState
from runbook.launch.readings import step_of

_TOLD_BY = {TRAINING_CSV: Event.PROGRESS, VAL_CSV: Event.EVAL}


class LateRows:
    """Follows rank 0's tables; `look` is called after its heartbeats were read."""

    def __init__(self, run_dir: Path) -> None:
        self._tails = {
            name: TableTail(run_dir / name, headerless=LEGACY_COLUMNS) for name in _TOLD_BY
        }
        self._newest = dict.fromkeys(_TOLD_BY, 0.0)

    def look(self, rank: RankState) -> None:
        """Note in the rank's state how many steps each file is behind, where it is.

        Files of another machine come late by themselves, so of a rank there nothing is noted.
        """
        if rank.elsewhere:
            return
        for name, tail in self._tails.items():
            told = rank.latest.get(_TOLD_BY[name], {}).get("step")
            for row in tail.rows():
                if (step := step_of(row)) < math.inf:
                    self._newest[name] = max(self._newest[name], step)
            if isinstance(told, int) and told > self._newest[name]:
                behind = told - int(self._newest[name])
                rank.late_rows[name] = max(rank.late_rows.get(name, 0), behind)
