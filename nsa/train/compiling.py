"""When torch compiled in this launch: before its steps, or in one that was timed."""

from __future__ import annotations

from nsa.contract import Event
from nsa.train.compiled import Compiled, count_compiled
from nsa.train.heartbeat import Heartbeat


class Compiling:
    """Holds the compiler's counts against those at the last look, and writes what was added.

    `in_steps`: graphs that were made or recorded in a block's timed steps: after its warm-up and
    after its toggles were judged.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._last = Compiled()
        self.in_steps = 0

    def begin_block(self) -> None:
        """A block's steps begin."""
        self.in_steps = 0

    def note(self, where: str, *, timed: bool = False) -> None:
        """Something has just run: `where` it was, and whether its time is measured."""
        now = count_compiled()
        if now == self._last:
            return
        added = now.work - self._last.work
        self._last = now
        if timed:
            self.in_steps += added
        self._heartbeat.write(
            Event.COMPILED,
            where=where,
            timed=timed,
            added=added,
            graphs=now.graphs,
            recorded=now.recorded,
            breaks=now.breaks,
        )
