"""One rank's heartbeats as evidence: how it ended, what it proved, and its account of each step.

Everything is computed once, from the columns of a whole file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nsa.contract import Event
from runbook.folder.launch.documents import name_below
from runbook.folder.launch.lines import MOST_STEPS, Exit, is_of_training
from runbook.folder.launch.rank_lines import ENDED, MARKS, SAID, RankLines
from runbook.records.evidence import RankLog
from runbook.text import listed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

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
    import numpy as np

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
        pids=tuple(said.pids),
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
    import numpy as np

    return np.flatnonzero(np.isin(said.events, [said.number_of[event] for event in events]))


def _others(said: RankLines) -> Ints:
    """The lines of events that are no part of a step."""
    import numpy as np

    own = {said.number_of[event] for event in _IN_A_STEP} | {said.number_of.get("", -1), -1}
    return np.flatnonzero(~np.isin(said.events, list(own)))


def _beside(said: RankLines, so_far: Ints) -> dict[int, frozenset[str]]:
    """Of each step, the first apart, the events before its end that are no part of a step."""
    import numpy as np

    names, found = list(said.number_of), dict[int, set[str]]()
    ends, others = _lines_of(said, Event.STEP_END), _others(said)
    following = np.searchsorted(ends, others)
    for line, end in zip(others.tolist(), following.tolist(), strict=True):
        if 0 < end < len(ends):
            found.setdefault(end, set()).add(names[said.events[line]])
    return {int(so_far[ends[end]]): frozenset(kinds) for end, kinds in found.items()}


def _steps_frame(said: RankLines, so_far: Ints) -> pd.DataFrame | None:
    """The columns of `RankLog.steps`, or None where no step ended."""
    import numpy as np

    ends, mono = _lines_of(said, Event.STEP_END), said.columns["mono"]
    if not len(ends):
        return None
    import pandas as pd

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
    import numpy as np

    found, first = np.unique(steps, return_index=True)
    place = np.minimum(np.searchsorted(found, ended), len(found) - 1)
    return np.where(found[place] == ended, first[place], -1) if len(found) else place


def _at(places: Ints, said: Floats) -> Floats:
    """What was said at these places; NaN at -1."""
    import numpy as np

    return np.append(said, np.nan)[places]
