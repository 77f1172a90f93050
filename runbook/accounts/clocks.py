"""One time by three clocks: the CSV's column dt_s, each rank's monotonic clock, the launcher's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from runbook.accounts import each_rank
from runbook.records import RankExit
from runbook.records.evidence import Column, Frame, RankLog

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Clocks agree within this share, and within what one pause of the machine may take.
CLOCK_TOLERANCE = 0.02
# How it is said that so much lies beside the steps that none is left to hold against a clock.
FEW_CLOCKED = "too few steps have a time in both files"
PAUSE_S = 0.1
# Between the end of a step and its heartbeat, in the middle of all steps.
JITTER_S = 5e-5
# Looking for new heartbeats, and being looked at late on a busy machine.
ARRIVAL_S = 1.0
# A heartbeat is read a tenth of a second after it was written, and of eight the nearest counts.
WALL_S = 10.0
# Of so many steps a quarter has to be timed by both; a shorter launch is for no rate.
FEWEST_CLOCKED = 40
# The middle of so many steps lies within their range at three standard errors: 2 * 0.5**10. Of
# fewer only the sum is held, on rank 0, which writes dt_s, each step too.
_MIDDLE = 10
# No time is missing between lines and their arrival on one machine (`RankExit.apart_s`): only the
# rounding of times is left. -0.2 ms at most in 46 healthy ranks, half of them
# beside two busy processes.
APART_S = 1e-3
# Starting and ending a launch, outside its ranks' clocks.
OVERHEAD_S = 60.0
# Rank 0 notes a step right after it ends: a typical step within this share and time, its place
# among the others within this time, and within so many steps where they end on a device. Worst
# of 127 healthy launches, many beside busy loops (benchmarks/results/trainer_costs.md): 0.19 ms of
# 28 ms, and 4.1 ms in steps of 56 ms; of 49 more on the host, in steps of up to 2.8 s, 0.05 ms.
STEP_TOLERANCE, STEP_S = 0.01, 3.5e-4
PLACE_STEPS, PLACE_S = 0.5, 0.015
# A device and its host count seconds a little differently, and the more so the longer they run.
PLACE_DRIFT = 1e-3
# By so much of the time that it waits for data a step may be longer by the clock than by dt_s: what
# is beyond, dt_s leaves out. 0.009 at most in 76 healthy launches, of steps of 28 ms.
WAIT_SHARE = 0.25
# One late heartbeat, and one step that a device ends late, move no others: two of five.
_PLACE_WINDOW, _PLACE_LEAST = 5, 3
# Over so few steps two clocks drift apart by little, and one wrong step shows.
_NEARBY = 10


BusySteps = Mapping[int, set[int]]


def busy_steps(ranks: Sequence[RankLog]) -> BusySteps:
    """Of each rank the steps whose clock counts more than the step.

    Something else happened in them, on the rank itself or on one that it waits for: in that step or
    in the one after.
    """
    own = {
        rank.rank: set(rank.steps.loc[~rank.steps["alone"].astype(bool), "step"].astype(int))
        for rank in ranks
        if rank.steps is not None
    }
    count = Counter(step for steps in own.values() for step in steps)
    return {
        number: {step + 1 for step in count if count[step] > (step in steps)} | count.keys()
        for number, steps in own.items()
    }


def time_account(
    frame: Frame,
    ranks: Sequence[RankLog],
    duration_s: float | None,
    exits: Sequence[RankExit] = (),
    lag: int = 0,
) -> list[str]:
    """Column dt_s, the ranks' monotonic clocks and the launcher's clock tell the same time.

    lag: so many steps a device may be behind the host that notes their ends (CUDA: 1).
    What a rank leaves out of the launch's time is held less the time that is nobody's (`away_s`).
    """
    away_s = {end.rank: end.away_s for end in exits}
    spent = {rank.rank: _processor_s(rank) for rank in ranks}
    problems, busy = _watched_clock(exits, spent), busy_steps(ranks)
    for rank in ranks:
        if rank.steps is None:
            problems.append(f"rank {rank.rank}: no step_end to time the steps by")
            continue
        problems += step_clock(frame, rank, busy, lag=lag)
        problems += wall_clock(rank)
        span = rank.clock_s
        if duration_s and span is not None:
            outside = duration_s - away_s.get(rank.rank, 0.0) - span
            longer = span > duration_s * (1 + CLOCK_TOLERANCE) + PAUSE_S
            if longer or outside > OVERHEAD_S + CLOCK_TOLERANCE * duration_s:
                of = "in" if longer else "of"
                problems.append(
                    f"rank {rank.rank} counts {span:.1f} s {of} a launch of {duration_s:.1f} s"
                )
    return problems


@each_rank
def _watched_clock(rank: RankExit, spent: Mapping[int, float]) -> Iterator[str]:
    """The clocks of a rank go as the same clocks do where it is watched: of what was noted there.

    Nothing where it was over before enough of its lines were seen. `spent`: processor time of each
    rank, s; what runs on another processor counts there up to its last tick, of each thread.
    """
    gap, said, watched = rank.wall_gap_s, rank.said_s, rank.watched_s
    if gap is not None and abs(gap) > WALL_S:
        side = "behind" if gap > 0 else "ahead of"
        yield (
            f" writes times (ts) that are {abs(gap):.1f} s {side} the clock of the machine that it "
            "runs on"
        )
    slack = CLOCK_TOLERANCE * (watched or 0.0) + ARRIVAL_S
    if said is not None and watched is not None and abs(watched - said) > slack:
        yield (
            f" counts {said:.1f} s between steps that arrived at the launcher in {watched:.1f} s"
        )
    if (rank.apart_s or 0.0) > APART_S:
        yield (
            f"'s clock goes otherwise than the launcher's: {rank.apart_s:.3f} s are missing "
            "between its heartbeats and their arrival"
        )
    most = CLOCK_TOLERANCE * spent.get(rank.rank, 0.0) + PAUSE_S
    if (rank.cpu_apart_s or 0.0) > most:
        yield (
            f" tells other processor times (cpu_s) than the kernel, which are "
            f"{rank.cpu_apart_s:.2f} s apart"
        )


def _processor_s(rank: RankLog) -> float:
    if rank.steps is None or "cpu_s" not in rank.steps:
        return 0.0
    return float(rank.steps["cpu_s"].fillna(0.0).max())


def step_clock(frame: Frame, rank: RankLog, busy: BusySteps, *, lag: int = 0) -> list[str]:
    """The steps of one rank: does its own clock show the time of column dt_s?

    Of all steps together on every rank, and of each by itself on rank 0, which writes dt_s: the
    others end theirs a little earlier or later.
    """
    both = clocked_steps(frame, rank, busy)
    if both is None or len(both) < (len(frame) // 4 if len(frame) >= FEWEST_CLOCKED else 1):
        return [f"rank {rank.rank}: {FEW_CLOCKED}"]
    apart, clock = both["clock_s"] - both["dt_s"], both["clock_s"]
    total = float(clock.sum())
    allowed = CLOCK_TOLERANCE * float(clock.median()) + JITTER_S + median_error(apart)
    off = len(both) >= _MIDDLE and abs(float(apart.median())) > allowed
    # A block begins with host and device side by side, and ends with the host up to `lag` ahead. A
    # rank that writes no dt_s ends a step a little earlier or later, at each end of a stretch anew.
    runs, waits = int(both["run"].nunique()), PLACE_STEPS * (rank.rank != 0)
    ahead = float(both["dt_s"].median()) * (lag * runs + waits * (runs - 1))
    most = CLOCK_TOLERANCE * total + PAUSE_S + ahead
    if (sums := abs(float(apart.sum())) > most) or off:
        share = float(both["dt_s"].sum()) / total if total else math.nan
        slack = most / total if sums and total else math.nan
        within = f", allowed are {1 - slack:.3f} to {1 + slack:.3f}" if slack < 1 else ""
        return [
            f"dt_s sums to {share:.3f} of what rank {rank.rank}'s clock shows for the same "
            f"{len(both)} steps{within}"
        ]
    if rank.rank:
        return []
    return _without_waiting(both, lag, ahead) or _step_by_step(both, lag)


def _without_waiting(both: Frame, lag: int, ahead: float) -> list[str]:
    """Is what dt_s leaves out the time that steps wait for data? Little here is much elsewhere."""
    if "fetch_s" not in both:
        return []
    apart, waited, clock = both["clock_s"] - both["dt_s"], both["fetch_s"], both["clock_s"]
    slack = PAUSE_S + PLACE_DRIFT * float(clock.sum()) + ahead
    found = _is_of(float(apart.sum()), float(waited.sum()), slack)
    # Behind a device the host may note a step anywhere between the ends of that one and the last.
    if not lag and len(both) >= _MIDDLE:
        usual = JITTER_S + median_error(apart)
        found |= _is_of(float(apart.median()), float(waited.median()), usual)
    if not found:
        return []
    return [
        "dt_s leaves out what waits for data, or something else that takes about as long: "
        f"{float(apart.sum()):.3g} s of {len(both)} steps, which waited {float(waited.sum()):.3g} "
        f"s; {float(apart.median()):.2g} s of a typical one, which waited "
        f"{float(waited.median()):.2g} s"
    ]


def _is_of(apart: float, waited: float, slack: float) -> bool:
    """Is a time that is missing a good part of that of waiting, and hardly more than all of it?"""
    return WAIT_SHARE * waited + slack < apart <= (1 + WAIT_SHARE) * waited


def wall_clock(rank: RankLog) -> list[str]:
    """A rank's wall clock goes as fast as its monotonic one: a system keeps both at one rate.

    The wall clock may be set, which moves one step's end, and not the middle of all.
    """
    if rank.steps is None or "ts" not in rank.steps or len(rank.steps) <= _MIDDLE:
        return []
    wall, clock = (rank.steps[name].diff().iloc[1:] for name in ("ts", "mono"))
    typical, apart = float(clock.median()), float((wall - clock).median())
    if abs(apart) <= CLOCK_TOLERANCE * abs(typical) + JITTER_S:
        return []
    return [
        f"rank {rank.rank}: a typical step takes {typical:.4f} s by the monotonic clock and "
        f"{typical + apart:.4f} s by the wall clock"
    ]


def _step_by_step(both: Frame, lag: int) -> list[str]:
    """Right in the sum, but smoothed, permuted or invented: what hides stalls and drift."""
    usual = float(both["clock_s"].median())
    typical = float((both["clock_s"] - both["dt_s"]).abs().median())
    # Behind a device the host may note a step anywhere between the ends of that one and the last.
    if not lag and typical > STEP_TOLERANCE * usual + STEP_S:
        return [f"dt_s is {typical:.4f} s off a typical step of {usual:.4f} s by rank 0's clock"]
    for _, steps in both.groupby("run"):
        drift = PLACE_DRIFT * float(steps["clock_s"].sum())
        moved = out_of_place_s(steps, lag)
        if not lag:
            moved = max(moved - drift, _moved_nearby_s(steps))
        allowed = PLACE_S + (PLACE_STEPS * usual + drift if lag else 0.0)
        if moved > allowed:
            return [
                f"dt_s moves step ends by {moved:.3f} s against rank 0's clock in steps "
                f"{steps['step'].iloc[0]} to {steps['step'].iloc[-1]}"
            ]
    return []


def _moved_nearby_s(steps: Frame) -> float:
    """How far dt_s moves an end against one `_NEARBY` steps before, beyond drift, s; or NaN."""
    late = _usual((steps["clock_s"] - steps["dt_s"]).cumsum())
    drift = PLACE_DRIFT * steps["clock_s"].cumsum().diff(_NEARBY)
    return float((late.diff(_NEARBY).abs() - drift).max())


def out_of_place_s(steps: Frame, lag: int) -> float:
    """How far, in s, the clock puts the ends of consecutive steps from where dt_s puts them.

    With C the ends by the clock and T those by dt_s: the host notes step k between T[k - lag] and
    T[k], so C - T keeps between c - lag * dt_s and c for one c, and the result is 0 or less. NaN
    where there are fewer than three steps.
    """
    late = (steps["clock_s"] - steps["dt_s"]).cumsum()
    early = late + lag * steps["dt_s"]
    return float(_usual(late).max() - _usual(early).min())


def _usual(ends: Column) -> Column:
    around = ends.rolling(_PLACE_WINDOW, min_periods=_PLACE_LEAST, center=True)
    usual: Column = around.median()
    return usual


def median_error(apart: Column) -> float:
    """Three standard errors of the median, from the middle half: a few steps on a busy machine."""
    spread = 1.4826 * float((apart - apart.median()).abs().median())
    return 3 * 1.2533 * spread / math.sqrt(len(apart))


def joined(frame: Frame, steps: Frame, *names: str) -> Frame:
    """The rows of `frame` that `steps` has too, with these columns of it as NAME_said."""
    import numpy as np

    own, theirs = frame["step"].to_numpy(), steps["step"].to_numpy()
    if np.array_equal(own, theirs) and bool((own[1:] > own[:-1]).all()):
        return frame.assign(**{f"{name}_said": steps[name].to_numpy() for name in names})
    said = steps[list(names)].set_axis([f"{name}_said" for name in names], axis=1)
    return frame.merge(said.assign(step=theirs), on="step")


def goes_on(frame: Frame) -> npt.NDArray[np.bool_]:
    """For each row: has the one before it the same arm and block? Always, where there are none."""
    import numpy as np

    same = np.ones(len(frame), dtype=np.bool_)
    for name in ("arm", "block"):
        if name in frame:
            own = frame[name]
            same &= (own.eq(own.shift()) & own.notna()).to_numpy(dtype=np.bool_)
    return same


def clocked_steps(frame: Frame, rank: RankLog, busy: BusySteps) -> Frame | None:
    """Steps with their dt_s and the clock_s between step_end and the one before, both in s.

    `run` numbers the stretches without a gap. Left out are the first step of an arm's block, and
    steps in whose time something else happened on any rank: the others wait for it then or in the
    step after.
    """
    if rank.steps is None or "dt_s" not in frame:
        return None
    told = [name for name in ("step", "dt_s", "fetch_s") if name in frame]
    both = frame[told].assign(inside=goes_on(frame))
    clock = rank.steps[["step"]].assign(clock_s=rank.steps["mono"].diff())
    both = joined(both, clock, "clock_s").rename(columns={"clock_s_said": "clock_s"})
    others = both["step"].isin(busy[rank.rank])
    kept: Frame = both[both["inside"] & ~others & both["clock_s"].notna()]
    return kept.assign(run=(kept["step"].diff() != 1).cumsum())


def clock_ratio(frame: Frame, rank: RankLog, busy: BusySteps, *, first_step: int = 0) -> float:
    """Time by the rank's own clock over time by dt_s, both of the steps that have both.

    `first_step` leaves warm-up out. 1 where no step has both: `time_account` says so.
    """
    both = clocked_steps(frame, rank, busy)
    if both is None:
        return 1.0
    both = both[both["step"] >= first_step]
    told = float(both["dt_s"].sum())
    return float(both["clock_s"].sum()) / told if told > 0 else 1.0
