"""One rank's heartbeats as evidence: how it ended, what it proved, and its account of each step.

Everything is computed once, from the columns of a whole file: of numbers, with rare records whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsa.contract import Event
from runbook.errors import listed
from runbook.folder.launch import (
    MOST_STEPS,
    Exit,
    WholeLines,
    event_of,
    is_of_training,
    parse_heartbeats,
    whole_number,
)
from runbook.folder.launch.documents import name_below
from runbook.folder.launch.shapes import is_any_number, is_digest, shape_of, shaped
from runbook.records.evidence import Effect, RankLog

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# What a step is made of: any other event between two steps' ends is time of its own.
_IN_A_STEP = (Event.STEP_START, Event.FETCHED, Event.PROGRESS, Event.STEP_END)


def read_heartbeats(path: Path, *, rank: int, relative_to: Path) -> RankLog:
    """Read one rank's heartbeats; never raises for what the file holds.

    A torn last line is dropped and counted, and is no damage; an unreadable line before it,
    another launch's token, another process or rank, or a clock that goes back is.
    Raises `OSError` if the file cannot be read at all.
    """
    return rank_log(RankLines.read(path, rank=rank), path=name_below(path, relative_to))


def rank_log(said: RankLines, *, path: str) -> RankLog:
    """What a heartbeat file is evidence of."""
    names, events, told = list(said.number_of), said.events, said.columns["step"]
    steps = np.where((told >= 0) & (told < MOST_STEPS), told, np.nan)
    known = ~np.isnan(steps)
    # Of each line the last step that was told up to there, 0 before the first.
    last = np.maximum.accumulate(np.where(known, np.arange(len(known)), -1))
    so_far = np.where(last < 0, 0, np.nan_to_num(steps)[last]).astype(np.int64)
    # The last one is for lines without an event, whose number is -1.
    trained = steps[np.array([*map(is_of_training, names), True])[events] & known]
    found = np.bincount(events[events >= 0], minlength=len(names)).tolist()
    counts = {name: count for name, count in zip(names, found, strict=True) if name and count}
    timed = np.flatnonzero(np.isfinite(said.columns["mono"]))
    mono, ts = said.columns["mono"][timed], said.columns["ts"]
    pauses = np.diff(ts := ts[np.isfinite(ts)])
    # Each process counts from a beginning of its own, at least after a reboot.
    pids = np.nan_to_num(said.columns["pid"], nan=-1.0)
    same = pids[timed[1:]] == pids[timed[1:] - 1]
    clock_back = int(np.count_nonzero(same & (np.diff(mono) < 0)))
    misshapen = tuple(f"step {so_far[line]}: {what}" for line, what in sorted(said.odd))
    strangers, unnamed = said.strangers(), int((events < 0).sum())

    problems = [*said.damage, *strangers]
    if dropped := said.dropped + unnamed:
        problems.append(f"{dropped} unreadable lines were dropped")
    if clock_back:
        problems.append(f"the monotonic clock goes back at {clock_back} places")
    if misshapen:
        problems.append(listed(misshapen, 1))
    damaged = bool(problems)
    if said.torn_bytes:
        problems.append(f"a torn last line was dropped ({said.torn_bytes} bytes)")
    ending, halted = said.last(Event.EXIT), counts.get(Event.HALT)
    end = Exit.told_by(ending) if said.kept.get(Event.EXIT) else None
    param_hash = ending.get("param_hash")
    return RankLog(
        rank=said.rank,
        path=path,
        sha256=said.sha256,
        events=len(events) - unnamed,
        tokens=frozenset(said.tokens),
        first_step=int(trained.min()) if len(trained) else None,
        last_step=int(trained[-1]) if len(trained) else None,
        last_event=names[events[-1]] if len(events) and events[-1] >= 0 else "",
        exit_code=end.code if end else None,
        exit_reason=end.reason if end else "",
        param_hash=str(param_hash) if param_hash else None,
        counts=counts,
        effects=tuple(said.effects),
        ddp_buckets=tuple(said.kept.get(Event.DDP_BUCKETS, ())),
        arm_failures=tuple(said.kept.get(Event.ARM_FAILED, ())),
        checkpoints=tuple(said.kept.get(Event.CHECKPOINT, ())),
        evaluations=tuple(said.kept.get(Event.EVAL, ())),
        nonfinite=said.last(Event.NONFINITE) or None,
        halt_reason=str(said.last(Event.HALT).get("reason", "")) if halted else None,
        pids=said.distinct("pid"),
        clock_s=float(mono[-1] - mono[0]) if len(mono) else None,
        silence_s=max(0.0, float(pauses.max())) if len(pauses) else None,
        last_ts=float(ts[-1]) if len(ts) else None,
        steps_back=int(np.count_nonzero(np.diff(so_far, prepend=0) < 0)),
        clocks_back=clock_back + int(np.count_nonzero(pauses < 0)),
        proof=said.last(Event.PROOF) or None,
        ending=ending,
        steps=_steps_frame(said, so_far),
        beside=_beside(said, so_far),
        misshapen=misshapen,
        problems=tuple(problems),
        damaged=damaged,
    )


def _lines_of(said: RankLines, *events: str) -> Ints:
    return np.flatnonzero(np.isin(said.events, [said.number_of[event] for event in events]))


def _others(said: RankLines) -> Ints:
    """The lines of events that are no part of a step."""
    own = {said.number_of[event] for event in _IN_A_STEP} | {said.number_of.get("", -1), -1}
    return np.flatnonzero(~np.isin(said.events, list(own)))


def _beside(said: RankLines, so_far: Ints) -> dict[int, frozenset[str]]:
    """Of each step, the first apart, the events before its end that are no part of a step."""
    names, found = list(said.number_of), dict[int, set[str]]()
    ends, others = _lines_of(said, Event.STEP_END), _others(said)
    following = np.searchsorted(ends, others)
    for line, end in zip(others.tolist(), following.tolist(), strict=True):
        if 0 < end < len(ends):
            found.setdefault(end, set()).add(names[said.events[line]])
    return {int(so_far[ends[end]]): frozenset(kinds) for end, kinds in found.items()}


def _steps_frame(said: RankLines, so_far: Ints) -> pd.DataFrame | None:
    """The columns of `RankLog.steps`, or None where no step ended."""
    ends, mono = _lines_of(said, Event.STEP_END), said.columns["mono"]
    if not len(ends):
        return None
    mono = np.where(np.isfinite(mono), mono, np.nan)  # no clock reads anything else
    before = np.searchsorted(_others(said), ends)
    ended = so_far[ends]
    marks = (_lines_of(said, event) for event in MARKS)
    begun, over, again, _ = (_at(_first_of(so_far[lines], ended), mono[lines]) for lines in marks)
    told = _first_of(so_far[_lines_of(said, Event.PROGRESS)], ended)
    with np.errstate(over="ignore", invalid="ignore"):  # a file may say anything
        fetch_clock_s = over - begun
    return pd.DataFrame(
        {
            "step": ended,
            "mono": mono[ends],
            "ts": said.columns["ts"][ends],
            "alone": np.concatenate([[False], before[1:] == before[:-1]]),
            "data": said.data,
            **{name: said.columns[name] for name in ENDED},
            **{name: _at(told, said.columns[name]) for name in SAID},
            "fetch_clock_s": fetch_clock_s,
            "timed_from": np.fmax(begun, again),
        },
        copy=False,
    )


def _first_of(steps: Ints, ended: Ints) -> Ints:
    """For each step that ended, where it stands first among these steps; -1 if it does not."""
    found, first = np.unique(steps, return_index=True)
    place = np.minimum(np.searchsorted(found, ended), len(found) - 1)
    return np.where(found[place] == ended, first[place], -1) if len(found) else place


def _at(places: Ints, said: Floats) -> Floats:
    """What was said at these places; NaN at -1."""
    return np.append(said, np.nan)[places]


Records = Sequence[Mapping[str, Any]]
_KEPT_PER_KIND = 4096
# Lines whose records are in memory together: as many as fit into a processor's cache.
_AT_ONCE = 2048
# When a step begins to fetch, has its data, was computed once more, and has ended.
MARKS = (Event.STEP_START, Event.FETCHED, Event.RECOMPUTED, Event.STEP_END)
# Numbers of a line; ENDED are those of a step's end, and SAID of its report.
_LINE = ("step", "mono", "ts", "pid", "rank")
_WHOLE = ("step", "pid", "rank")
# Of whose fields one that is no number is told: of a clock, where it times a step.
_TELLERS: Mapping[str, tuple[Event, ...]] = {
    "step": (), "pid": (), "rank": (), "mono": MARKS, "ts": (Event.STEP_END,)
}  # fmt: skip
ENDED = ("embedded", "mem_mib", "reserved_mib", "rss_mib", "cuda_mib", "cpu_s")
SAID = ("loss", "toks_per_s", "grad_norm", "fetch_s")


@dataclass(kw_only=True)
class RankLines:
    """The heartbeats of one file.

    `events` has of each line the number of its event, below 0 for none; those of others follow our
    own. `columns` has the numbers of each line, of each step's end and of each report; NaN is what
    a line does not tell, or no number.

    Records of another trainer may have events of its own, `msg` for `event` or neither, no token
    and no monotonic clock.
    """

    rank: int
    lines: int = 0
    sha256: str = ""
    torn_bytes: int = 0
    dropped: int = 0
    damage: list[str] = field(default_factory=list)
    tokens: dict[str, None] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    kept: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    # What has another shape, by the number of its line.
    odd: list[tuple[int, str]] = field(default_factory=list)
    events: Ints
    columns: dict[str, Floats] = field(default_factory=dict)
    _parts: dict[str, list[Floats]] = field(
        default_factory=lambda: {name: [] for name in (*_LINE, *ENDED, *SAID)}
    )
    number_of: dict[str, int] = field(
        default_factory=lambda: {event.value: number for number, event in enumerate(Event)}
    )
    data: list[str | None] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, *, rank: int) -> Self:
        """Read a whole file. Raises `OSError`."""
        history, lines = cls(rank=rank, events=np.empty(0, dtype=np.int64)), WholeLines(path)
        events = [history.events]
        for block in lines:
            whole = [line for line in block.split(b"\n") if line.strip()]
            for begin in range(0, len(whole), _AT_ONCE):
                events.append(history._take(whole[begin : begin + _AT_ONCE]))
        history.sha256, history.torn_bytes = lines.sha256, lines.torn_bytes
        history.damage += lines.problems
        history.events = np.concatenate(events)
        # One after the other, so that hardly more than one is in memory twice.
        for name in (*_LINE, *ENDED, *SAID):
            history.columns[name] = np.concatenate([np.empty(0), *history._parts.pop(name)])
        return history

    def _take(self, whole: Sequence[bytes]) -> Ints:
        """Put whole lines into the columns, and return the numbers of their events.

        Those that hold no record are counted.
        """
        found = parse_heartbeats(whole)
        records = [record for record in found if record is not None]
        self.dropped += len(found) - len(records)
        known, lines = self.number_of, self.lines + np.arange(len(records))
        self.lines += len(records)
        told: list[Any] = [event_of(record) for record in records]
        for event in dict.fromkeys(told):
            if event is not None:
                known.setdefault(event, len(known))
        number = np.array([known.get(event, -1) for event in told], dtype=np.int64)
        tokens = (record.get("token") for record in records)
        self.tokens |= dict.fromkeys(str(token) for token in tokens if token is not None)

        def of(*events: str) -> tuple[Records, Ints]:
            """The records of these events, and the numbers of their lines."""
            places = np.flatnonzero(np.isin(number, [known[event] for event in events]))
            return [records[place] for place in places.tolist()], lines[places]

        ended, said = of(Event.STEP_END), of(Event.PROGRESS)
        for names, own in ((_LINE, (records, lines)), (ENDED, ended), (SAID, said)):
            for name in names:
                self._parts[name].append(self._numbers(name, *own))
        self.data += self._digests(*ended)
        for record, line in zip(*of(Event.EFFECT, *shape_of("events")), strict=True):
            self._keep(record, line)
        return number

    def _numbers(self, name: str, records: Records, lines: Ints) -> Floats:
        """A field as numbers; a null is nothing, any other value that is none is remembered."""
        values: list[Any] = [record.get(name) for record in records]
        fits = _is_whole if name in _WHOLE else is_any_number
        found = np.array([float(one) if fits(one) else np.nan for one in values], dtype=np.float64)
        tellers = _TELLERS.get(name, (*MARKS, Event.PROGRESS))
        for place in np.flatnonzero(np.isnan(found)).tolist() if tellers else ():
            if (value := values[place]) is None or is_any_number(value):
                continue
            if (event := event_of(records[place])) in tellers:
                what = f"{event}.{name} has an unexpected value: {str(value)[:40]!r}"
                self._complain(what, lines[place])
        return found

    def _digests(self, records: Records, lines: Ints) -> list[str | None]:
        values = [record.get("data") for record in records]
        good = [value if is_digest(value) else None for value in values]
        for value, kept, line in zip(values, good, lines, strict=True):
            if kept is not value:
                self._complain(f"{Event.STEP_END}.data is no digest: {str(value)[:40]!r}", line)
        return good

    def _complain(self, what: str, line: int) -> None:
        if len(self.odd) < _KEPT_PER_KIND:
            self.odd.append((int(line), what))

    def _keep(self, record: Mapping[str, Any], line: int) -> None:
        """Keep the first records of an event, and the last, which says how it ended."""
        event = str(event_of(record))
        if event == Event.EFFECT:
            if len(self.effects) < _KEPT_PER_KIND:
                self.effects.append(_effect(record, self.rank))
            return
        fitted, problems = shaped(record, shape_of("events")[event], event)
        for problem in problems:
            self._complain(problem, line)
        kept = self.kept.setdefault(event, [])
        del kept[_KEPT_PER_KIND - 1 :]
        kept.append(fitted)

    def distinct(self, name: str) -> tuple[int, ...]:
        """The whole numbers of a field, in the order in which they came."""
        return tuple(int(one) for one in pd.unique(self.columns[name]) if one == one)

    def strangers(self) -> list[str]:
        """What in the file is not the word of one process of this rank in one launch."""
        found, pids = [], self.distinct("pid")
        others = sorted({*self.distinct("rank")} - {self.rank})
        if len(self.tokens) > 1:
            found.append(f"heartbeats of {len(self.tokens)} launches in one file")
        elif len(pids) > 1:
            named = ", ".join(map(str, pids))
            found.append(f"heartbeats of {len(pids)} processes in one file: {named}")
        if others:
            found.append(f"heartbeats of other ranks in the file: {others}")
        return found

    def last(self, event: str) -> Mapping[str, Any]:
        """The last record of an event, or an empty one."""
        return self.kept.get(event, [{}])[-1]


def _effect(record: Mapping[str, Any], rank: int) -> Effect:
    took = record.get("took_effect")
    return Effect(
        toggle=str(record.get("toggle", "")),
        value=str(record.get("value", "")),
        took_effect=took if isinstance(took, bool) else None,
        evidence=record.get("evidence"),
        arm=str(record.get("arm") or ""),
        block=whole_number(record.get("block")) or 0,
        rank=rank,
    )


def _is_whole(value: object) -> bool:
    return whole_number(value) is not None
