"""One rank's heartbeats as evidence: how it ended, what it proved, and its account of each step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.contract import Event
from runbook.errors import first_of
from runbook.folder.launch.documents import name_below
from runbook.folder.launch.heartbeats import STEPPING, RankFold, fold_file, whole_number
from runbook.folder.launch.rows import Table
from runbook.folder.launch.shapes import EVENTS, is_any_number, is_digest, shaped
from runbook.records.evidence import Effect, RankLog

if TYPE_CHECKING:
    import pandas as pd

    from runbook.folder.launch.columns import Columns, Floats, Forms, Ints

_KEPT_PER_KIND = 4096
# What a step is made of: any other event between two steps' ends is time of its own.
_IN_A_STEP = frozenset({*STEPPING, Event.FETCHED})
# Numbers of a step's end, kept as they are.
_KEPT = ("mem_mib", "reserved_mib", "rss_mib", "cuda_mib", "cpu_s")
_SAID = ("loss", "toks_per_s", "grad_norm", "fetch_s")
_ENDED: Mapping[str, type] = {
    "step": int, "mono": float, "ts": float, "alone": bool, "embedded": float, "data": str,
    **dict.fromkeys(_KEPT, float),
}  # fmt: skip
_PROGRESS: Mapping[str, type] = {"step": int, **dict.fromkeys(_SAID, float)}
# When a step begins to fetch, has its data, and was computed once more.
_MARKS: Mapping[str, type] = {"step": int, "mono": float}
_OWN: Mapping[str, tuple[str, ...]] = {Event.STEP_END: ("embedded", *_KEPT), Event.PROGRESS: _SAID}


@dataclass(kw_only=True)
class RankHistory(RankFold):
    """A fold that keeps the evidence as well: effects, steps, and the records of rare events."""

    counts: Counter[str] = field(default_factory=Counter)
    effects: list[Effect] = field(default_factory=list)
    kept: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    ended: Table = field(default_factory=lambda: Table(_ENDED))
    progress: Table = field(default_factory=lambda: Table(_PROGRESS))
    started: Table = field(default_factory=lambda: Table(_MARKS))
    fetched: Table = field(default_factory=lambda: Table(_MARKS))
    again: Table = field(default_factory=lambda: Table(_MARKS))
    misshapen: list[str] = field(default_factory=list)
    beside: dict[int, frozenset[str]] = field(default_factory=dict)
    _alone: bool = False
    _others: set[str] = field(default_factory=set)
    _forms: Forms | None = None

    def take_lines(self, block: bytes) -> None:
        """Fold whole lines in: those of one form together, in columns, the others one by one."""
        from runbook.folder.launch.columns import Forms

        self._forms = self._forms or Forms(_for_columns)
        columns = self._forms.columns(block)
        if columns is None:
            super().take_lines(block)
            return
        for piece in columns.pieces():
            if isinstance(piece, slice):
                self._take_columns(columns, piece)
            else:
                super().take_lines(columns.line(piece))

    def take(self, record: Mapping[str, Any]) -> None:
        """Fold one record in, and keep it if it is a rare one."""
        super().take(record)
        if not self.event:
            return
        self.counts[self.event] += 1
        self._take_account(record)
        if self.event == Event.EFFECT:
            self._keep_effect(record)
        elif self.event in EVENTS:
            self._keep(self._in_shape(record))

    def _take_columns(self, columns: Columns, lines: slice) -> None:
        """What `take` does with the record of each of these lines."""
        import numpy as np

        self.take_many(columns, lines)
        for form, count in columns.forms_in(lines):
            self.counts[form.record["event"]] += count
        ends = columns.each(lines, _tells(Event.STEP_END))
        broken = columns.each(lines, lambda record: record["event"] not in _IN_A_STEP)
        marks = np.flatnonzero(ends | broken)
        self._take_others(columns, lines, np.flatnonzero(broken), np.flatnonzero(ends))
        alone = np.concatenate([[self._alone], ends[marks]])
        self._alone = bool(alone[-1])
        if ends.any():
            own: dict[str, Any] = {
                name: columns.number(name)[lines][ends]
                for name, kind in _ENDED.items()
                if kind in (int, float)
            }
            own["alone"], own["data"] = alone[:-1][ends[marks]], columns.texts(lines, ends)
            self.ended.extend(own)
        said = columns.each(lines, _tells(Event.PROGRESS))
        if said.any():
            self.progress.extend({name: columns.number(name)[lines][said] for name in _PROGRESS})
        for event, table in self._marks().items():
            told = columns.each(lines, _tells(event))
            if told.any():
                table.extend({name: columns.number(name)[lines][told] for name in _MARKS})

    def _take_others(self, columns: Columns, lines: slice, broken: Ints, ends: Ints) -> None:
        """Which events, at the places `broken`, came before which end of a step."""
        import numpy as np

        if not self._others and not len(broken):
            return
        events = columns.each(lines, lambda record: record["event"])
        before: dict[int, set[str]] = {0: self._others}
        following = np.searchsorted(ends, broken).tolist()
        for place, end in zip(broken.tolist(), following, strict=True):
            before.setdefault(end, set()).add(str(events[place]))
        self._others = before.pop(len(ends), set())
        steps = columns.number("step")[lines][ends]
        for end, kinds in before.items():
            if kinds and (end or self.ended):
                self.beside[int(steps[end])] = frozenset(kinds)

    def _take_account(self, record: Mapping[str, Any]) -> None:
        """What this step says, to be held against the CSV's row of it."""
        if self.event == Event.STEP_END:
            embedded, *kept = (self._number(record, name) for name in ("embedded", *_KEPT))
            when = self._number(record, "mono")
            if when is not None and not math.isfinite(when):
                when = None  # no clock reads that
            digest = self._digest(record)
            wall = self._number(record, "ts")
            if self._others and self.ended:
                self.beside[self.step] = frozenset(self._others)
            self._others = set()
            self.ended.add((self.step, when, wall, self._alone, embedded, digest, *kept))
            self._alone = True
            return
        if (mark := self._marks().get(self.event)) is not None:
            mark.add((self.step, self._number(record, "mono")))
        if self.event == Event.PROGRESS:
            said = (self._number(record, name) for name in _SAID)
            self.progress.add((self.step, *said))
        if self.event not in _IN_A_STEP:
            self._alone = False
            self._others.add(self.event)

    def _marks(self) -> dict[str, Table]:
        return {
            Event.STEP_START: self.started,
            Event.FETCHED: self.fetched,
            Event.RECOMPUTED: self.again,
        }

    def _number(self, record: Mapping[str, Any], name: str) -> float | None:
        """A field as a number, NaN included; a null is nothing, anything else is remembered."""
        value = record.get(name)
        if value is None:
            return None
        if is_any_number(value):
            return float(value)
        self._misshapen(f"{self.event}.{name} has an unexpected value: {str(value)[:40]!r}")
        return None

    def _digest(self, record: Mapping[str, Any]) -> str | None:
        value = record.get("data")
        if value is None:
            return None
        if is_digest(value):
            return str(value)
        self._misshapen(f"{self.event}.data is no digest: {str(value)[:40]!r}")
        return None

    def _in_shape(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        if (shape := EVENTS.get(self.event)) is None:
            return record
        fitted, problems = shaped(record, shape, self.event)
        for problem in problems:
            self._misshapen(problem)
        return fitted

    def _misshapen(self, what: str) -> None:
        if len(self.misshapen) < _KEPT_PER_KIND:
            self.misshapen.append(f"step {self.step}: {what}")

    def steps_frame(self) -> pd.DataFrame | None:
        """The columns of `RankLog.steps`, or None where no step ended."""
        if not self.ended:
            return None
        import numpy as np

        frame = self.ended.frame()
        ended = frame["step"].to_numpy()
        said = _of_steps(self.progress.frame(), ended)
        begun, over, again = (
            _of_steps(table.frame(), ended)["mono"] for table in self._marks().values()
        )
        with np.errstate(over="ignore", invalid="ignore"):  # a file may say anything
            timed = {"fetch_clock_s": over - begun, "timed_from": np.fmax(begun, again)}
        return frame.assign(**said, **timed)

    def _keep_effect(self, record: Mapping[str, Any]) -> None:
        if len(self.effects) >= _KEPT_PER_KIND:
            return
        took = record.get("took_effect")
        self.effects.append(
            Effect(
                toggle=str(record.get("toggle", "")),
                value=str(record.get("value", "")),
                took_effect=took if isinstance(took, bool) else None,
                evidence=record.get("evidence"),
                arm=str(record.get("arm") or ""),
                block=whole_number(record.get("block")) or 0,
                rank=self.rank,
            )
        )

    def _keep(self, record: Mapping[str, Any]) -> None:
        kept = self.kept.setdefault(self.event, [])
        if len(kept) < _KEPT_PER_KIND:
            kept.append(record)
        else:
            kept[-1] = record  # the last one is the one that says how it ended

    def last(self, event: str) -> Mapping[str, Any]:
        """The last record of an event, or an empty one."""
        return self.kept.get(event, [{}])[-1]


def _tells(event: str) -> Callable[[Mapping[str, Any]], bool]:
    """Is a record of this event?"""
    return lambda record: bool(record["event"] == event)


def _of_steps(said: pd.DataFrame, ended: Ints) -> dict[str, Floats]:
    """What was said of each of these steps, by name; of a step that was said twice, the first."""
    import numpy as np

    steps, first = np.unique(said["step"].to_numpy(), return_index=True)
    place = np.searchsorted(steps, ended)
    known = place < len(steps)
    known[known] = steps[place[known]] == ended[known]
    found = {name: np.full(len(ended), np.nan) for name in said.columns.drop("step")}
    for name, column in found.items():
        column[known] = said[name].to_numpy()[first[place[known]]]
    return found


def _for_columns(record: Mapping[str, Any]) -> bool:
    """Whether lines like this one say nothing that has to be kept whole or complained about."""
    event, pid, phase = (record.get(name) for name in ("event", "pid", "phase"))
    if not isinstance(event, str) or not event or event == Event.EFFECT or event in EVENTS:
        return False
    if not isinstance(phase, str) or not phase:
        return False
    number = whole_number(pid)
    if number is None or abs(number) >= 1 << 63:
        return False
    own = (record.get(name) for name in _OWN.get(event, ()))
    digest = record.get("data")
    return all(value is None or is_any_number(value) for value in own) and (
        digest is None or is_digest(digest)
    )


def read_heartbeats(path: Path, *, rank: int, relative_to: Path) -> RankLog:
    """Read one rank's heartbeats; never raises for what the file holds.

    A torn last line is dropped and counted, and is no damage; an unreadable line before it,
    another launch's token, another process or rank, or a clock that goes back is.
    Raises `OSError` if the file cannot be read at all.
    """
    history = RankHistory(rank=rank)
    sha256, torn = fold_file(path, history)
    return rank_log(history, sha256=sha256, torn=torn, path=name_below(path, relative_to))


def rank_log(history: RankHistory, *, sha256: str, torn: int, path: str) -> RankLog:
    """What a folded heartbeat file is evidence of; `torn` bytes of it are half a line."""
    problems = [*history.damage, *history.strangers()]
    if dropped := history.dropped + history.unnamed:
        problems.append(f"{dropped} unreadable lines were dropped")
    if history.clock_back:
        problems.append(f"the monotonic clock goes back at {history.clock_back} places")
    if history.misshapen:
        problems.append(first_of(history.misshapen))
    damaged = bool(problems)
    if torn:
        problems.append(f"a torn last line was dropped ({torn} bytes)")
    param_hash = history.last(Event.EXIT).get("param_hash")
    halted = history.counts[Event.HALT]
    return RankLog(
        rank=history.rank,
        path=path,
        sha256=sha256,
        events=history.events,
        tokens=frozenset(history.tokens),
        first_step=history.first_step,
        last_step=history.last_step,
        exit_code=history.exit_code,
        exit_reason=history.exit_reason,
        param_hash=str(param_hash) if param_hash else None,
        counts=dict(history.counts),
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
        beside=history.beside,
        dropped_lines=dropped + bool(torn),
        problems=tuple(problems),
        damaged=damaged,
    )
