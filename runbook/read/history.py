"""One rank's heartbeats as evidence: how it ended, what it proved, and its account of each step."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.contract import Event
from runbook.read.documents import name_below
from runbook.read.heartbeats import STEPPING, RankFold, fold_file, whole_number
from runbook.read.shapes import EVENTS, is_any_number, shaped
from runbook.records.evidence import Effect, RankLog

if TYPE_CHECKING:
    import pandas as pd

_KEPT_PER_KIND = 4096
# What a step is made of: any other event between two steps' ends is time of its own.
_IN_A_STEP = frozenset({*STEPPING, Event.FETCHED})
# Numbers of a step's end, kept as they are.
_KEPT = ("mem_mib", "reserved_mib", "rss_mib", "cuda_mib", "cpu_s")
_STEP_COLUMNS = ("step", "mono", "ts", "alone", "embedded", "data", *_KEPT)
_SAID = ("loss", "toks_per_s", "grad_norm")
_DIGEST = re.compile(r"[0-9a-fA-F]{1,16}")


@dataclass(kw_only=True)
class RankHistory(RankFold):
    """A fold that keeps the evidence as well: effects, steps, and the records of rare events."""

    counts: Counter[str] = field(default_factory=Counter)
    effects: list[Effect] = field(default_factory=list)
    kept: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    ended: list[tuple[Any, ...]] = field(default_factory=list)
    progress: list[tuple[Any, ...]] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    _alone: bool = False

    def take(self, record: Mapping[str, Any]) -> None:
        """Fold one record in, and keep it if it is a rare one."""
        super().take(record)
        if not self.event:
            return
        self.counts[self.event] += 1
        self._take_account(record)
        if self.event == Event.EFFECT:
            self._keep_effect(record)
        elif self.event not in STEPPING:
            self._keep(self._in_shape(record))

    def _take_account(self, record: Mapping[str, Any]) -> None:
        """What this step says, to be held against the CSV's row of it."""
        if self.event == Event.STEP_END:
            embedded, *kept = (self._number(record, name) for name in ("embedded", *_KEPT))
            when = self._number(record, "mono")
            if when is not None and not math.isfinite(when):
                when = None  # no clock reads that
            digest = self._digest(record)
            wall = self._number(record, "ts")
            self.ended.append((self.step, when, wall, self._alone, embedded, digest, *kept))
            self._alone = True
        elif self.event == Event.PROGRESS:
            said = (self._number(record, name) for name in _SAID)
            self.progress.append((self.step, *said))
        elif self.event not in _IN_A_STEP:
            self._alone = False

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
        if value is None or (isinstance(value, str) and _DIGEST.fullmatch(value)):
            return value
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
        import pandas as pd

        if not self.ended:
            return None
        ended = pd.DataFrame(self.ended, columns=_STEP_COLUMNS)
        said = pd.DataFrame(self.progress, columns=("step", *_SAID))
        for name in ("mono", "ts", "embedded", *_KEPT):
            ended[name] = ended[name].astype(float)
        for name in _SAID:
            said[name] = said[name].astype(float)
        return ended.merge(said.drop_duplicates("step"), on="step", how="left")

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
    problems = history.strangers()
    if dropped := history.dropped + history.unnamed:
        problems.append(f"{dropped} unreadable lines were dropped")
    if history.clock_back:
        problems.append(f"the monotonic clock goes back at {history.clock_back} places")
    if history.misshapen:
        more = f" and {len(history.misshapen) - 1} more" if len(history.misshapen) > 1 else ""
        problems.append(f"{history.misshapen[0]}{more}")
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
        nonfinite=history.last(Event.NONFINITE) or None,
        halt_reason=str(history.last(Event.HALT).get("reason", "")) if halted else None,
        pids=tuple(history.pids),
        clock_s=history.clock_s,
        proof=history.last(Event.PROOF) or None,
        ending=history.last(Event.EXIT),
        steps=history.steps_frame(),
        dropped_lines=dropped + bool(torn),
        problems=tuple(problems),
        damaged=damaged,
    )
