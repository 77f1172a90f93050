"""One rank's heartbeats as evidence: how it ended, what it proved, and its account of each step.

Everything is computed once, from the columns of a whole file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from nsa.contract import Event
from runbook.errors import first_of
from runbook.folder.launch.documents import name_below
from runbook.folder.launch.lines import MOST_STEPS, Exit, is_of_training
from runbook.folder.launch.rank_lines import ENDED, MARKS, SAID, RankLines
from runbook.records.evidence import RankLog

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]

# What a step is made of: any other event between two steps' ends is time of its own.
_IN_A_STEP = (Event.STEP_START, Event.FETCHED, Event.PROGRESS, Event.STEP_END)


@dataclass(kw_only=True)
class RankHistory(RankLines):
    """Who wrote the heartbeats of a file, how far they go, and how they end."""

    @property
    def unnamed(self) -> int:
        """How many of them name no event."""
        return int((self.events < 0).sum())

    @property
    def last_event(self) -> str:
        """The event of the last record; empty if it names none."""
        number = int(self.events[-1]) if self.lines else -1
        return list(self._number_of)[number] if number >= 0 else ""

    @property
    def counts(self) -> dict[str, int]:
        """How many records there are of each event."""
        import numpy as np

        numbers = self.events
        found = np.bincount(numbers[numbers >= 0], minlength=len(self._number_of)).tolist()
        named = zip(self._number_of, found, strict=True)
        return {event: count for event, count in named if event and count}

    @property
    def exit(self) -> Exit | None:
        """How the rank said that it ended."""
        return Exit.told_by(self.last(Event.EXIT)) if self.kept.get(Event.EXIT) else None

    @cached_property
    def _steps(self) -> Floats:
        """The steps that lines tell; NaN where a line tells none."""
        import numpy as np

        told = self.columns["step"]
        return np.where((told >= 0) & (told < MOST_STEPS), told, np.nan)

    @cached_property
    def _so_far(self) -> Ints:
        """Of each line the last step that was told up to there, 0 before the first."""
        import numpy as np

        known = ~np.isnan(self._steps)
        last = np.maximum.accumulate(np.where(known, np.arange(len(known)), -1))
        return np.where(last < 0, 0, np.nan_to_num(self._steps)[last]).astype(np.int64)

    @property
    def steps_back(self) -> int:
        """At how many places a step is below the one before."""
        import numpy as np

        return int(np.count_nonzero(np.diff(self._so_far, prepend=0) < 0))

    @cached_property
    def _of_training(self) -> Floats:
        """The steps of the training itself, as they were told."""
        import numpy as np

        ours = [is_of_training(event) for event in self._number_of]
        # The last one is for lines without an event, whose number is -1.
        own = np.array([*ours, True])[self.events] & ~np.isnan(self._steps)
        steps: Floats = self._steps[own]
        return steps

    @property
    def first_step(self) -> int | None:
        """The lowest step of the training."""
        return int(self._of_training.min()) if len(self._of_training) else None

    @property
    def last_step(self) -> int | None:
        """The step of the training that was told last."""
        return int(self._of_training[-1]) if len(self._of_training) else None

    def _clock(self, name: str) -> tuple[Floats, Ints]:
        """The readings of a clock, and the numbers of their lines."""
        import numpy as np

        told = self.columns[name]
        lines = np.flatnonzero(np.isfinite(told))
        return told[lines], lines

    @property
    def clock_back(self) -> int:
        """At how many places the monotonic clock goes back.

        Each process counts from a beginning of its own, at least after a reboot.
        """
        import numpy as np

        mono, lines = self._clock("mono")
        pids = np.nan_to_num(self.columns["pid"], nan=-1.0)
        same = pids[lines[1:]] == pids[lines[1:] - 1]
        return int(np.count_nonzero(same & (np.diff(mono) < 0)))

    @property
    def clock_s(self) -> float | None:
        """Seconds from the first record to the last, on the rank's monotonic clock."""
        mono, _ = self._clock("mono")
        return float(mono[-1] - mono[0]) if len(mono) else None

    @property
    def wall_clock_back(self) -> int:
        """At how many places the wall clock goes back."""
        import numpy as np

        return int(np.count_nonzero(np.diff(self._clock("ts")[0]) < 0))

    @property
    def silence_s(self) -> float | None:
        """The longest time between two records by the wall clock; None of fewer."""
        import numpy as np

        pauses = np.diff(self._clock("ts")[0])
        return max(0.0, float(pauses.max())) if len(pauses) else None

    @property
    def last_ts(self) -> float | None:
        """The wall clock of the last record that tells it."""
        ts, _ = self._clock("ts")
        return float(ts[-1]) if len(ts) else None

    @property
    def misshapen(self) -> list[str]:
        """Values of another shape than their readers expect, in the order of the lines."""
        return [f"step {self._so_far[line]}: {what}" for line, what in sorted(self._odd)]

    def strangers(self) -> list[str]:
        """What in the file is not the word of one process of this rank in one launch."""
        found = []
        if len(self.tokens) > 1:
            found.append(f"heartbeats of {len(self.tokens)} launches in one file")
        elif len(self.pids) > 1:
            pids = ", ".join(map(str, self.pids))
            found.append(f"heartbeats of {len(self.pids)} processes in one file: {pids}")
        if self.other_ranks:
            found.append(f"heartbeats of other ranks in the file: {sorted(self.other_ranks)}")
        return found

    def _lines_of(self, *events: str) -> Ints:
        import numpy as np

        return np.flatnonzero(np.isin(self.events, [self._number_of[e] for e in events]))

    def beside(self) -> dict[int, frozenset[str]]:
        """Of each step, the first apart, the events before its end that are no part of a step."""
        import numpy as np

        ends = self._lines_of(Event.STEP_END)
        events, found = list(self._number_of), dict[int, set[str]]()
        others = self._others()
        following = np.searchsorted(ends, others)
        for line, end in zip(others.tolist(), following.tolist(), strict=True):
            if 0 < end < len(ends):
                found.setdefault(end, set()).add(events[self.events[line]])
        return {int(self._so_far[ends[end]]): frozenset(said) for end, said in found.items()}

    def _others(self) -> Ints:
        """The lines of events that are no part of a step."""
        import numpy as np

        own = {self._number_of[event] for event in _IN_A_STEP} | {self._number_of.get("", -1), -1}
        return np.flatnonzero(~np.isin(self.events, list(own)))

    def steps_frame(self) -> pd.DataFrame | None:
        """The columns of `RankLog.steps`, or None where no step ended."""
        import numpy as np

        ends, mono = self._lines_of(Event.STEP_END), self.columns["mono"]
        if not len(ends):
            return None
        import pandas as pd

        mono = np.where(np.isfinite(mono), mono, np.nan)  # no clock reads anything else
        before = np.searchsorted(self._others(), ends)
        ended = self._so_far[ends]
        begun, over, again, _ = (
            _at(_first_of(self._so_far[lines], ended), mono[lines])
            for lines in map(self._lines_of, MARKS)
        )
        told = _first_of(self._so_far[self._lines_of(Event.PROGRESS)], ended)
        with np.errstate(over="ignore", invalid="ignore"):  # a file may say anything
            fetch_clock_s = over - begun
        return pd.DataFrame(
            {
                "step": ended,
                "mono": mono[ends],
                "ts": self.columns["ts"][ends],
                "alone": np.concatenate([[False], before[1:] == before[:-1]]),
                "data": self._data,
                **{name: self.columns[name] for name in ENDED},
                **{name: _at(told, self.columns[name]) for name in SAID},
                "fetch_clock_s": fetch_clock_s,
                "timed_from": np.fmax(begun, again),
            },
            copy=False,
        )


def _first_of(steps: Ints, ended: Ints) -> Ints:
    """For each step that ended, where it stands first among these steps; -1 if it does not."""
    import numpy as np

    found, first = np.unique(steps, return_index=True)
    place = np.minimum(np.searchsorted(found, ended), len(found) - 1)
    return np.where(found[place] == ended, first[place], -1) if len(found) else place


def _at(places: Ints, said: Floats) -> Floats:
    """What was said at these places; NaN at -1."""
    import numpy as np

    return np.append(said, np.nan)[places]


def read_heartbeats(path: Path, *, rank: int, relative_to: Path) -> RankLog:
    """Read one rank's heartbeats; never raises for what the file holds.

    A torn last line is dropped and counted, and is no damage; an unreadable line before it,
    another launch's token, another process or rank, or a clock that goes back is.
    Raises `OSError` if the file cannot be read at all.
    """
    return rank_log(RankHistory.read(path, rank=rank), path=name_below(path, relative_to))


def rank_log(history: RankHistory, *, path: str) -> RankLog:
    """What a heartbeat file is evidence of."""
    problems = [*history.damage, *history.strangers()]
    if dropped := history.dropped + history.unnamed:
        problems.append(f"{dropped} unreadable lines were dropped")
    if back := history.clock_back:
        problems.append(f"the monotonic clock goes back at {back} places")
    if misshapen := history.misshapen:
        problems.append(first_of(misshapen))
    damaged = bool(problems)
    if history.torn_bytes:
        problems.append(f"a torn last line was dropped ({history.torn_bytes} bytes)")
    counts, end = history.counts, history.exit
    param_hash = history.last(Event.EXIT).get("param_hash")
    halted = counts.get(Event.HALT)
    return RankLog(
        rank=history.rank,
        path=path,
        sha256=history.sha256,
        events=history.lines - history.unnamed,
        tokens=frozenset(history.tokens),
        first_step=history.first_step,
        last_step=history.last_step,
        exit_code=end.code if end else None,
        exit_reason=end.reason if end else "",
        param_hash=str(param_hash) if param_hash else None,
        counts=counts,
        effects=tuple(history.effects),
        ddp_buckets=tuple(history.kept.get(Event.DDP_BUCKETS, ())),
        arm_failures=tuple(history.kept.get(Event.ARM_FAILED, ())),
        checkpoints=tuple(history.kept.get(Event.CHECKPOINT, ())),
        evaluations=tuple(history.kept.get(Event.EVAL, ())),
        nonfinite=history.last(Event.NONFINITE) or None,
        halt_reason=str(history.last(Event.HALT).get("reason", "")) if halted else None,
        pids=tuple(history.pids),
        clock_s=history.clock_s,
        proof=history.last(Event.PROOF) or None,
        ending=history.last(Event.EXIT),
        steps=history.steps_frame(),
        beside=history.beside(),
        dropped_lines=dropped + bool(history.torn_bytes),
        problems=tuple(problems),
        damaged=damaged,
    )
