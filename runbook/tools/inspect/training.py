"""A training.csv taken apart: which runs it holds, what its numbers can say, and what else says so.

The accounts of a run are the second source. Rows without heartbeats, and a run that has not ended,
have none to hold their numbers against: that is one remark, and no suspicion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from runbook.accounts import Workload
from runbook.accounts.clocks import FEW_CLOCKED, FEWEST_CLOCKED
from runbook.accounts.registry import Sources, unbalanced
from runbook.errors import how_many, listed
from runbook.folder.launch.evidence import read_training_csv
from runbook.records import LaunchResult, Stop
from runbook.records.evidence import RankLog, TrainingLog
from runbook.records.measurement import TOKENS_PER_SECOND, Measurement
from runbook.stats.throughput import (
    StatisticsError,
    WindowTooShort,
    cadence,
    effective,
    last_window,
    measured_rows,
    measurement,
    typical,
    warmup_cut,
)
from runbook.tools.inspect import Found, Remark, RemarkCode, RowsFacts, Segment, remarks_on

_SMOOTH = 5
# Measured numbers cannot be equal in so many rows.
_MANY = 10
_FLOOR_SLACK = 0.05
_RATE_SLACK = 0.02


def value_remarks(frame: pd.DataFrame) -> Iterator[Found]:
    for name in ("loss", "toks_per_s"):
        if name not in frame:
            continue
        bad = frame[~np.isfinite(frame[name].to_numpy(dtype=np.float64))]
        if len(bad):
            text = f"{name} is not finite in {len(bad)} rows, first at step "
            yield RemarkCode.NON_FINITE, f"{text}{int(bad['step'].iloc[0])}"
    for name in ("dt_s", "toks_per_s"):
        if name in frame and (wrong := int((frame[name] <= 0).sum())):
            yield RemarkCode.CLOCK_BACK, f"{name} is not above zero in {wrong} rows"
    if {"tokens", "dt_s", "toks_per_s"} <= set(frame) and len(frame):
        stated, implied = frame["toks_per_s"], frame["tokens"] / frame["dt_s"]
        off = frame[((stated - implied).abs() > _RATE_SLACK * implied.abs())]
        if len(off):
            text = f"toks_per_s is not tokens / dt_s in {len(off)} rows, "
            yield RemarkCode.RATE_DOES_NOT_FOLLOW, f"{text}first at step {int(off['step'].iloc[0])}"


def part_remarks(part: pd.DataFrame) -> Iterator[Found]:
    """What one run's rows lack, and what cannot stay or change as it does in them."""
    steps, every = part["step"].to_numpy(), cadence(part)
    gaps = np.flatnonzero(np.diff(steps) > every)
    if len(gaps):
        at = int(gaps[0])
        first, last = int(steps[at]) + 1, int(steps[at + 1]) - 1
        more = f", and {len(gaps) - 1} gaps more" if len(gaps) > 1 else ""
        yield RemarkCode.MISSING_STEPS, f"steps {first}-{last} are not there{more}"
    if "tokens" in part and part["tokens"].nunique() > 1:
        changed = part[part["tokens"] != part["tokens"].iloc[0]]
        before, after = part["tokens"].iloc[0], changed["tokens"].iloc[0]
        text = f"{before:.0f} tokens per step, {after:.0f} at step {int(changed['step'].iloc[0])}"
        yield RemarkCode.TOKENS_CHANGE, text
    for name in ("loss", "dt_s", "toks_per_s"):
        if name in part and len(part) >= _MANY and part[name].nunique(dropna=False) == 1:
            text = f"{name} is {part[name].iloc[0]:g} in each of {len(part)} rows"
            yield RemarkCode.CONSTANT_COLUMN, text


def floor_remarks(
    log: TrainingLog, parts: list[pd.DataFrame], floor: float | None, source: str
) -> Iterator[Found]:
    """A mean over a few rows below the floor: a single row may dip below it by chance."""
    if floor is None or not parts or "loss" not in log.frame:
        return
    losses = (part.set_index("step")["loss"] for part in parts)
    smooth = pd.concat([one.rolling(min(_SMOOTH, len(one))).mean() for one in losses]).dropna()
    if len(smooth) and smooth.min() < floor - _FLOOR_SLACK:
        text = (
            f"the loss reaches {smooth.min():.3f} at step {smooth.idxmin()}, below {floor:.3f} "
            f"({source}): the model sees what it should predict, or the data is not what it is "
            "said to be"
        )
        yield RemarkCode.BELOW_FLOOR, text


def parts_of(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The stretches of rows in which the step increases."""
    if not len(frame):
        return
    backs = frame["step"].diff() <= 0
    yield from (part for _, part in frame.groupby(backs.cumsum()))


def segment_of(index: int, part: pd.DataFrame) -> Segment:
    steps = part["step"].to_numpy()
    return Segment(
        index=index,
        rows=len(part),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        every=cadence(part),
        warmup_rows=warmup_rows(part),
        arms=arms_of(part),
    )


def arms_of(part: pd.DataFrame) -> tuple[str, ...]:
    return tuple(sorted(set(part["arm"]) - {""})) if "arm" in part else ()


def warmup_rows(part: pd.DataFrame) -> int:
    """Leading rows that are slower than the rest, or those that the trainer marked itself."""
    if "warmup" in part and bool(part["warmup"].any()):
        return int(part["warmup"].sum())
    if "dt_s" not in part and "toks_per_s" not in part:
        return 0
    if "dt_s" in part:
        times = part["dt_s"].to_numpy(dtype=np.float64)
    else:
        rates = part["toks_per_s"].to_numpy(dtype=np.float64)
        times = 1.0 / np.where(rates > 0, rates, np.nan)
    return warmup_cut(times) if bool(np.isfinite(times).all()) else 0


WINDOW = 50
_SLOW = 0.95


def window_of(
    log: TrainingLog, parts: list[pd.DataFrame]
) -> tuple[list[Measurement], int, list[Found]]:
    """The last 50 steps and the other rates of the last run, and how many rows such a window has.

    What is not finite is no number that anybody could quote; another remark names such rows.
    """
    if not parts or "toks_per_s" not in log.frame:
        return [], 0, [_too_short(0, 1)]
    if bool((log.frame["step"] < 0).any()):
        return [], 0, [(RemarkCode.UNREADABLE, "steps below zero: no window can be taken")]
    arms = arms_of(parts[-1])
    with np.errstate(all="ignore"):
        one_of_arms = arms and len(parts) == 1
        found = _window_of_arms(log, arms) if one_of_arms else _window_of_rows(log, parts[-1])
    statistics, available, remarks = found
    return [one for one in statistics if math.isfinite(float(one.value))], available, remarks


def _window_of_rows(
    log: TrainingLog, part: pd.DataFrame
) -> tuple[list[Measurement], int, list[Found]]:
    last, steps = replace(log, frame=part), part["step"].to_numpy()
    available = int(np.count_nonzero(steps > steps[-1] - WINDOW))
    rates = _rates_over_time(last)
    try:
        window = last_window(last, n=WINDOW)
    except WindowTooShort as error:
        available = min(available, error.available)
        return rates, available, [_too_short(available, cadence(part))]
    return [window, *rates], available, list(_slow_start(part, window))


def _window_of_arms(
    log: TrainingLog, arms: Sequence[str]
) -> tuple[list[Measurement], int, list[Found]]:
    statistics = []
    for arm in arms:
        for compute in (last_window, effective):
            with suppress(StatisticsError):
                statistics.append(compute(log, arm=arm))
    least = min(WINDOW, *(len(measured_rows(log, arm=arm)) for arm in arms))
    short = [] if least == WINDOW else [_too_short(least, 1, " of its poorest arm")]
    return statistics, least, short


def _slow_start(part: pd.DataFrame, window: Measurement) -> Iterator[Found]:
    """Slow rows of the run's beginning in its window, which the trainer has not marked as such."""
    if "warmup" in part and bool(part["warmup"].any()):
        return
    rates, outside = part["toks_per_s"].to_numpy(dtype=np.float64), len(part) - window.n
    cut = warmup_rows(part)
    if slow := int(np.count_nonzero(rates[outside:cut] < _SLOW * np.median(rates[cut:]))):
        rows = how_many(slow, "warm-up row")
        text = f"the last {window.n} rows hold {rows} (window: {window.window})"
        yield RemarkCode.WARMUP_IN_WINDOW, text


def _rates_over_time(log: TrainingLog) -> list[Measurement]:
    """typical and effective throughput; without tokens and times, rows count as equal tokens."""
    found = []
    if "tokens" in log.frame and "dt_s" in log.frame:
        for compute in (typical, effective):
            with suppress(StatisticsError):
                found.append(compute(log))
        return found
    rows = log.frame.iloc[warmup_rows(log.frame) :]
    rates = rows["toks_per_s"].to_numpy(dtype=np.float64)
    if not len(rates) or not bool((rates > 0).all()):
        return []
    value = float(len(rates) / np.sum(1.0 / rates))
    note = "tokens over time of the last run without its warm-up, if every row is as many tokens"
    name, unit = "toks_per_s_last_run", TOKENS_PER_SECOND
    one = measurement(log, rows, name=name, value=value, unit=unit)
    return [one.model_copy(update={"note": note})]


def _too_short(available: int, every: int, of: str = "") -> Found:
    cadence = f", one row per {every} steps" if every > 1 else ""
    usable = how_many(available, "usable row")
    text = f"the last {WINDOW} steps{of} are not there: {usable}{cadence}"
    return RemarkCode.WINDOW_TOO_SHORT, text


_SAID_ELSEWHERE = ("steps do not increase", "the file has no header", "the header lacks")


def inspect_training(
    path: Path, *, relative_to: Path, floor: float | None, floor_source: str
) -> tuple[RowsFacts, TrainingLog, list[Remark]]:
    """Return what a training.csv holds, its rows, and what is suspicious about them.

    `floor` is the loss in nats that no model of this data can go below, or None.
    Raises OSError if the file cannot be read.
    """
    log = read_training_csv(path, relative_to=relative_to)
    parts = list(parts_of(log.frame))
    segments = tuple(segment_of(index, part) for index, part in enumerate(parts, start=1))
    statistics, available, usable = window_of(log, parts)
    told = ("path", "sha256", "legacy", "dropped_rows")
    facts = RowsFacts(
        **{name: getattr(log, name) for name in told},
        rows=len(log.frame),
        segments=segments,
        statistics=tuple(statistics),
        window_steps_available=available,
    )
    found = [
        *_file_remarks(log),
        *_segment_remarks(segments),
        *usable,
        *value_remarks(log.frame),
        *(remark for part in parts for remark in part_remarks(part)),
        *floor_remarks(log, parts, floor, floor_source),
    ]
    return facts, log, remarks_on(log.path, found)


def _file_remarks(log: TrainingLog) -> Iterator[Found]:
    """What the reader noticed; the step order has remarks of its own, the old form is no fault."""
    for problem in log.problems:
        if problem.startswith(_SAID_ELSEWHERE):
            continue
        code = RemarkCode.TORN_ROWS if "dropped" in problem else RemarkCode.UNREADABLE
        if problem.startswith("the header occurs"):
            code = RemarkCode.MIXED_RUNS
        yield code, problem


def _segment_remarks(segments: tuple[Segment, ...]) -> Iterator[Found]:
    if len(segments) < 2:
        return
    first = segments[0]
    again = [one for one in segments[1:] if one.first_step <= first.first_step + first.every]
    all_of_them = [f"steps {s.first_step}-{s.last_step} ({s.rows} rows)" for s in segments]
    spans = listed(all_of_them, 8, between="; ")
    if again:
        yield RemarkCode.MIXED_RUNS, f"{len(again) + 1} runs in one file: {spans}"
    if elsewhere := len(segments) - 1 - len(again):
        text = (
            f"steps go back or repeat at {elsewhere} places without a restart: two writers, "
            f"or a run resumed into the same file ({spans})"
        )
        yield RemarkCode.STEPS_NOT_INCREASING, text


def account_remarks(
    log: TrainingLog | None,
    ranks: Sequence[RankLog],
    env: Mapping[str, Any] | None,
    end: LaunchResult | None,
    *,
    gates: pd.DataFrame | None,
    val: pd.DataFrame | None,
    stop: Stop | None = None,
) -> Iterator[Found]:
    """Every account that does not balance, or why none can be drawn; `end` is the launcher's.

    None is where every rank was ended by the planned `stop`.
    """
    if log is None or log.damaged or not len(log.frame):
        return  # said already, and there is nothing to balance
    if stop and ranks and all(rank.exit_code == stop.code for rank in ranks):
        return
    if why := _nothing_to_hold_against(ranks, env):
        yield RemarkCode.NO_SECOND_SOURCE, why
        return
    try:
        work = Workload.of(env or {})
    except ValueError as error:
        yield RemarkCode.UNBALANCED, str(error)
        return
    sources = Sources(
        frame=log.frame,
        ranks=ranks,
        work=work,
        env=env or {},
        gates=gates,
        val=val,
        duration_s=(end.duration_s or None) if end else None,
        exits=end.ranks if end else (),
    )
    short = len(log.frame) < FEWEST_CLOCKED
    for problem in unbalanced(sources).problems:
        few = short and problem.endswith(FEW_CLOCKED)
        yield RemarkCode.WINDOW_TOO_SHORT if few else RemarkCode.UNBALANCED, problem


def _nothing_to_hold_against(ranks: Sequence[RankLog], env: Mapping[str, Any] | None) -> str:
    if not ranks:
        return "no heartbeats beside the rows: no number here has a second source"
    if all(rank.steps is None or rank.steps["embedded"].isna().all() for rank in ranks):
        return "heartbeats that count no tokens: no number here has a second source"
    wanted = (env or {}).get("world_size")
    present = {rank.rank for rank in ranks}
    absent = sorted(set(range(wanted)) - present) if isinstance(wanted, int) else []
    open_ends = absent or sorted(rank.rank for rank in ranks if rank.exit_code != 0)
    if open_ends:
        names = ", ".join(map(str, open_ends))
        return f"no good end of rank {names}: what the ranks say is not held against the rows"
    return ""
