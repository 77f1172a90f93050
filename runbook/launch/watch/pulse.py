"""What the heartbeats say while a launch runs: who lives, who is silent for longer than usual.

This is for whoever looks on. It ends nothing: what is a hang, the watchdog decides by its budgets.
"""

from __future__ import annotations

from collections.abc import Sequence

from runbook.launch.observer import Pulse, Silence
from runbook.launch.watch.ranks import RankState
from runbook.launch.watch.watchdog import SLOW_PHASES, STOPPED, blame

# Silence is worth a word from this many of a rank's usual pauses on, and never before LEAST_S: the
# files are looked at ten times a second, and a busy machine is late by itself.
_TIMES_USUAL = 3.0
_LEAST_S = 2.0
# A rank that was heard too seldom to have a usual pause.
_UNKNOWN_S = 10.0


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
