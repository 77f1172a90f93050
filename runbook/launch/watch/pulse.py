"""What the heartbeats say while a launch runs: who lives, who is silent for longer than usual.

This is for whoever looks on. It ends nothing: what is a hang, the watchdog decides by its budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runbook.launch.watch.ranks import RankState
from runbook.launch.watch.watchdog import SLOW_PHASES, STOPPED, blame

# Silence is worth a word from this many of a rank's usual pauses on, and never before LEAST_S: the
# files are looked at ten times a second, and a busy machine is late by itself.
_TIMES_USUAL = 3.0
_LEAST_S = 2.0
# A rank that was heard too seldom to have a usual pause.
_UNKNOWN_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Silence:
    """A rank that has said nothing for longer than it usually does.

    `usual_s` is its median pause, None if it was heard too seldom; `state` is in words why it
    cannot speak, if the kernel knows.
    """

    rank: int
    silent_s: float
    usual_s: float | None = None
    state: str = ""


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """The ranks of a launch now; `wanted` is 0 for one that has no heartbeats.

    `busy` is what the slowest rank is in where that may take long (a `nsa.contract.Phase`), since
    `busy_s`. `silent` begins with the rank that the others wait for.
    """

    alive: int = 0
    wanted: int = 0
    busy: str = ""
    busy_s: float = 0.0
    silent: tuple[Silence, ...] = ()

    @property
    def shape(self) -> tuple[object, ...]:
        """What makes it worth telling anew: all but the seconds."""
        return (self.alive, self.wanted, self.busy, tuple(one.rank for one in self.silent))


def pulse_of(ranks: Sequence[RankState], *, wanted: int, now: float) -> Pulse:
    """The pulse at `now`, on the clock of `RankState.changed_at`.

    Nobody is silent while a rank is in something that may take long: the others wait for it.
    """
    alive = [state for state in ranks if not state.ended]
    slow = [state for state in alive if state.phase in SLOW_PHASES]
    if slow:
        longest = min(slow, key=lambda state: state.phase_since)
        since = now - longest.phase_since
        return Pulse(alive=len(alive), wanted=wanted, busy=longest.phase, busy_s=since)
    quiet = [state for state in alive if _is_silent(state, now)]
    if not quiet:
        return Pulse(alive=len(alive), wanted=wanted)
    states = {state.rank: state.process_state for state in quiet}
    first = blame(quiet, states).rank
    quiet.sort(key=lambda state: (state.rank != first, state.rank))
    silent = tuple(
        Silence(
            rank=state.rank,
            silent_s=now - state.changed_at,
            usual_s=state.usual_s,
            state=STOPPED.get(states[state.rank], ""),
        )
        for state in quiet
    )
    return Pulse(alive=len(alive), wanted=wanted, silent=silent)


def _is_silent(state: RankState, now: float) -> bool:
    usual = state.usual_s
    limit = _UNKNOWN_S if usual is None else max(_LEAST_S, _TIMES_USUAL * usual)
    return now - state.changed_at > limit
