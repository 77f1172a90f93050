"""Decides from the ranks' last signs of life whether a launch hangs, and which rank is to blame.

The limits of all that watches a launch are here: `Thresholds` and `Budgets`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nsa.contract import Event, Phase
from nsa.toggles import TOGGLES, read_values
from runbook.errors import UsageError
from runbook.launch.watch.rank_state import RankState
from runbook.records import End, Kind, Launch, LaunchStatus

_LEARNED_FACTOR = 5.0
# What may take long without a sign of life, and has a budget of its own.
SLOW_PHASES = (Phase.INIT, Phase.FIRST_STEP, Phase.EVAL, Phase.CHECKPOINT, Phase.PROFILE)
_PHASE_ORDER: tuple[str, ...] = (
    Phase.INIT, Phase.FIRST_STEP, Phase.DATA, Phase.STEP, Phase.PROFILE, Phase.EVAL,
    Phase.CHECKPOINT, Phase.EXIT,
)  # fmt: skip
_EVENT_ORDER: tuple[str, ...] = (
    Event.STEP_START, Event.FETCHED, Event.RECOMPUTED, Event.STEP_END, Event.PROGRESS,
)  # fmt: skip
# These have a field of `Budgets` each, called after them.
_BUDGETED = frozenset(Phase) - {Phase.STEP}
STOPPED = {"T": "stopped", "t": "stopped by a tracer", "D": "in an uninterruptible wait"}


def _toggle(name: str) -> Any:
    """A field with the default of `NSA_WATCH_<name>`, which owns the number."""
    toggle = f"NSA_WATCH_{name}"
    return field(default=TOGGLES[toggle].default, metadata={"toggle": toggle})


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Limits of the detectors. Counts are readings in a row; 0 switches a detector off.

    The first seven are toggles, which own their defaults. The others are not: a spike is a loss
    above the recent median by half of it (and by ten of its spreads), an explosion is a gradient
    norm a hundred times the recent median, growth is memory that rises in five blocks of ten
    readings in a row by a quarter and by 256 MiB.
    """

    heartbeat_stall_s: float = _toggle("HEARTBEAT_STALL_S")
    flatline_n: int = _toggle("FLATLINE_N")
    gate_collapse_n: int = _toggle("GATE_COLLAPSE_N")
    gate_entropy_min: float = _toggle("GATE_ENTROPY_MIN")
    gate_max: float = _toggle("GATE_MAX_THRESHOLD")
    interval_s: float = _toggle("INTERVAL_S")
    halt: bool = _toggle("HALT")
    zero_gradient_n: int = 3
    spike_share: float = 0.5
    spike_spreads: float = 10.0
    explosion_factor: float = 100.0
    growth_blocks: int = 5
    growth_block_rows: int = 10
    growth_share: float = 0.25
    growth_mib: float = 256.0

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Thresholds:
        """The defaults, changed by the `NSA_WATCH_*` among `variables`.

        Raises `UsageError` that lists every bad value.
        """
        own = {part.metadata["toggle"]: part.name for part in fields(cls) if part.metadata}
        values, problems = read_values({k: text for k, text in variables.items() if k in own})
        if problems:
            raise UsageError(problems)
        chosen: dict[str, Any] = {own[name]: value for name, value in values.items()}
        return cls(**chosen)


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Seconds without a sign of life that mean a hang, for each phase of a rank.

    One flat number gives false alarms in every healthy run: a first step compiles, a checkpoint
    writes, a profile has a million events. An ordinary step has what the toggle of the watchdog
    says. `silence_s` is what a rank has to its first heartbeat.
    """

    init_s: float = 300.0
    first_step_s: float = 600.0
    data_s: float = Thresholds.heartbeat_stall_s
    step_s: float = Thresholds.heartbeat_stall_s
    eval_s: float = 600.0
    checkpoint_s: float = 600.0
    profile_s: float = 600.0
    exit_s: float = 60.0
    silence_s: float = 300.0

    @classmethod
    def for_launch(cls, launch: Launch) -> Budgets:
        """The defaults, with the launch's own `NSA_WATCH_HEARTBEAT_STALL_S` for step and data.

        At most a quarter of the launch's time: a rank that hangs must be named before that is over,
        which names nobody. Raises `UsageError` if the toggle is no number.
        """
        variables = {} if launch.own else launch.env
        stall_s = Thresholds.from_variables(variables).heartbeat_stall_s
        stall_s = launch.own.silence_s if launch.own else stall_s
        return cls.with_stall(min(stall_s, launch.timeout_s / 4))

    @classmethod
    def with_stall(cls, stall_s: float) -> Budgets:
        """The defaults with this budget for step and data; 0 leaves them."""
        return replace(cls(), step_s=stall_s, data_s=stall_s) if stall_s > 0 else cls()

    def of_phase(self, phase: str, *, longest_step_s: float = 0.0) -> float:
        """The budget of a rank's phase; an unknown phase has that of a step.

        A step may always take five times as long as the longest one seen in this launch.
        """
        if phase in _BUDGETED:
            return float(getattr(self, f"{phase}_s"))
        return max(self.step_s, _LEARNED_FACTOR * longest_step_s)


class Watchdog:
    """Remembers until when waiting was excused; everything else comes from the ranks."""

    def __init__(self, budgets: Budgets, *, wanted: int) -> None:
        self._budgets = budgets
        self._wanted = wanted
        self._excused_at: dict[int, float] = {}

    def find_hang(self, ranks: Sequence[RankState], *, now: float) -> End | None:
        """The hang, if a rank has been silent for longer than its phase allows.

        A rank that waits while another one is rightly busy with something slow (a checkpoint, an
        evaluation) is no hang. Its time begins anew when that is over: it cannot go on at the very
        instant at which the other one is done.
        Until all `wanted` ranks have a heartbeat file nothing is decided here.
        """
        alive = [state for state in ranks if not state.ended]
        if not alive or len(ranks) < self._wanted:
            return None
        longest = max(state.longest_step_s for state in alive)
        slow = self._rightly_slow(alive, longest, now)
        for state in alive:
            if any(rank != state.rank and step <= state.step for step, rank in slow):
                self._excused_at[state.rank] = now
        if all(self._left(state, longest, now) >= 0 for state in alive):
            return None
        return self.name_culprit(ranks, now=now)

    def name_culprit(
        self,
        ranks: Sequence[RankState],
        *,
        now: float,
        busy: frozenset[int] = frozenset(),
        entered: Mapping[int, int] | None = None,
    ) -> End:
        """Who is to blame for a hang that was found; `busy` ranks are known from their stacks.

        `entered` is the last collective that each rank entered, from its flight record.
        """
        alive = [state for state in ranks if not state.ended]
        longest = max(state.longest_step_s for state in alive)
        culprit = blame(alive, busy, entered)
        age, rank, phase = now - culprit.changed_at, f"rank {culprit.rank}", culprit.phase
        where = f"silent for {age:.1f} s in phase {phase} at step {culprit.step}"
        budget = f"(budget {self._budgets.of_phase(phase, longest_step_s=longest):g} s)"
        process, kind = culprit.process_state, Kind.NONE
        if process in STOPPED:
            kind = Kind.FROZEN
            cause = f"frozen: {rank} is {STOPPED[process]} ({process}), {where}"
        elif phase == Phase.DATA:
            kind = Kind.DATA_STALL
            waits = f"has waited {age:.1f} s for a batch at step {culprit.step} {budget}"
            advice = "the same run on synthetic data tells loader and trainer apart"
            cause = f"data stall: {rank} {waits}; {advice}"
        else:
            cause = f"hang: {rank} {where} {budget}"
        return End(status=LaunchStatus.HUNG, cause=cause, culprit_rank=culprit.rank, kind=kind)

    def _rightly_slow(
        self, alive: Sequence[RankState], longest: float, now: float
    ) -> list[tuple[int, int]]:
        """Step and rank of the two least far ones that are busy with something slow, in time.

        Nobody waits for a rank that is further on: then the late one itself is to blame. With two
        of them, each rank is held against one that is not itself.
        """
        busy = (
            (state.step, state.rank)
            for state in alive
            if state.phase in SLOW_PHASES and self._left(state, longest, now) >= 0
        )
        return sorted(busy)[:2]

    def _left(self, state: RankState, longest: float, now: float) -> float:
        budget = self._budgets.of_phase(state.phase, longest_step_s=longest)
        since = state.changed_at
        if state.phase not in SLOW_PHASES:
            since = max(since, self._excused_at.get(state.rank, 0.0))
        return budget - (now - since)


def blame(
    alive: Sequence[RankState],
    busy: frozenset[int] = frozenset(),
    entered: Mapping[int, int] | None = None,
) -> RankState:
    """The rank that the others wait for.

    In this order: one that the kernel holds stopped; the one that is fewest steps along; the one
    that is least far in its step; the one that entered fewest collectives, where all ranks have
    told (`entered`); one whose stack is in its own code while the others' are in a
    collective (`busy`); the one that has been silent longest.
    """

    told = entered if entered and all(state.rank in entered for state in alive) else {}

    def key(state: RankState) -> tuple[bool, int, int, int, int, bool, float]:
        return (
            state.process_state not in STOPPED,
            state.step,
            _PHASE_ORDER.index(state.phase if state.phase in _PHASE_ORDER else Phase.STEP),
            _EVENT_ORDER.index(state.event) if state.event in _EVENT_ORDER else 1,
            told.get(state.rank, 0),
            state.rank not in busy,
            state.mono or state.changed_at,
        )

    return min(alive, key=key)
