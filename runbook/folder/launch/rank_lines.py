"""One rank's heartbeats as they were read: columns of numbers, and rare records whole.

What shows only in lines that follow each other `rank_log` computes from these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from nsa.contract import Event
from runbook.folder.launch.lines import WholeLines, event_of, parse_heartbeats, whole_number
from runbook.folder.launch.shapes import EVENTS, LARGEST_COUNT, is_any_number, is_digest, shaped
from runbook.records.evidence import Effect

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]

Records = Sequence[Mapping[str, Any]]
_KEPT_PER_KIND = 4096
# Lines whose records are in memory together: as many as fit into a processor's cache.
_AT_ONCE = 2048
# When a step begins to fetch, has its data, was computed once more, and has ended.
MARKS = (Event.STEP_START, Event.FETCHED, Event.RECOMPUTED, Event.STEP_END)
# Events that are kept whole.
_RARE = (Event.EFFECT, *EVENTS)
# Numbers of a line; ENDED are those of a step's end, and SAID of its report.
_LINE = ("step", "mono", "ts", "pid")
_WHOLE = ("step", "pid")
# Of whose fields one that is no number is told: of a clock, where it times a step.
_TELLERS: Mapping[str, tuple[Event, ...]] = {
    "step": (), "pid": (), "mono": MARKS, "ts": (Event.STEP_END,)
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
    pids: dict[int, None] = field(default_factory=dict)
    other_ranks: set[int] = field(default_factory=set)
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
        import numpy as np

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
        import numpy as np

        found = parse_heartbeats(whole)
        records = [record for record in found if record is not None]
        self.dropped += len(found) - len(records)
        known, lines = self.number_of, self.lines + np.arange(len(records))
        self.lines += len(records)
        told = _values(records, "event")
        if not {str}.issuperset(map(type, told)):
            told = [event_of(record) for record in records]
        for event in dict.fromkeys(told):
            if event is not None:
                known.setdefault(event, len(known))
        number = np.array([known.get(event, -1) for event in told], dtype=int)
        self._take_speakers(records)

        def of(*events: str) -> tuple[Records, Ints]:
            """The records of these events, and the numbers of their lines."""
            places = np.flatnonzero(np.isin(number, [known[event] for event in events]))
            return [records[place] for place in places.tolist()], lines[places]

        ended, said = of(Event.STEP_END), of(Event.PROGRESS)
        for names, own in ((_LINE, (records, lines)), (ENDED, ended), (SAID, said)):
            for name in names:
                self._parts[name].append(self._numbers(name, *own))
        self.data += self._digests(*ended)
        for record, line in zip(*of(*_RARE), strict=True):
            self._keep(record, line)
        return number

    def _take_speakers(self, records: Records) -> None:
        for token in _distinct(records, "token"):
            if token is not None:
                self.tokens[str(token)] = None
        for pid in _distinct(records, "pid"):
            if (number := whole_number(pid)) is not None:
                self.pids[number] = None
        for rank in _distinct(records, "rank"):
            if (number := whole_number(rank)) is not None and number != self.rank:
                self.other_ranks.add(number)

    def _numbers(self, name: str, records: Records, lines: Ints) -> Floats:
        """A field as numbers; a null is nothing, any other value that is none is remembered."""
        import numpy as np

        values = _values(records, name)
        found = _numbers(values, _is_whole if name in _WHOLE else is_any_number)
        tellers = _TELLERS.get(name, (*MARKS, Event.PROGRESS))
        for place in np.flatnonzero(np.isnan(found)).tolist() if tellers else ():
            if (value := values[place]) is None or is_any_number(value):
                continue
            if (event := event_of(records[place])) in tellers:
                what = f"{event}.{name} has an unexpected value: {str(value)[:40]!r}"
                self._complain(what, lines[place])
        return found

    def _digests(self, records: Records, lines: Ints) -> list[str | None]:
        values = _values(records, "data")
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
        fitted, problems = shaped(record, EVENTS[event], event)
        for problem in problems:
            self._complain(problem, line)
        kept = self.kept.setdefault(event, [])
        del kept[_KEPT_PER_KIND - 1 :]
        kept.append(fitted)

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


def _values(records: Records, name: str) -> list[Any]:
    """The values of a field, None where a record lacks it."""
    try:
        return [record[name] for record in records]  # nearly always, and soonest
    except KeyError:
        return [record.get(name) for record in records]


def _distinct(records: Records, name: str) -> list[Any]:
    """The values of a field, or one of them where all are the same."""
    values = _values(records, name)
    return values[:1] if values and values.count(values[0]) == len(values) else values


def _is_whole(value: object) -> bool:
    return whole_number(value) is not None


def _numbers(values: list[Any], fits: Callable[[object], bool]) -> Floats:
    """Values as an array, NaN for what does not fit."""
    import numpy as np

    plain: set[type] = {int, type(None)} if fits is _is_whole else {int, float, type(None)}
    try:
        if plain.issuperset(map(type, values)):
            found = np.array(values, dtype=np.float64)
            if not (np.abs(found) >= LARGEST_COUNT).any():
                return found
    except OverflowError:
        pass  # a whole number that no float64 can hold is none of ours
    return np.array([float(value) if fits(value) else np.nan for value in values])
