"""A training.csv taken apart: which runs it holds, what its numbers can say, and what else says so.

The launcher's plan and the accounts of a run are the second source. What the launcher had planned
is no fault: a stop, or a few steps only. Rows without heartbeats, and a run that has not ended,
have none to hold their numbers against: that is one remark, and no suspicion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pydantic import ValidationError

from runbook.accounts import Workload
from runbook.accounts.clocks import FEW_CLOCKED, FEWEST_CLOCKED
from runbook.accounts.registry import Sources, unbalanced
from runbook.folder.launch.evidence import read_training_csv
from runbook.records import Launch, LaunchResult, RankExit, Stop
from runbook.records.evidence import RankLog, TrainingLog
from runbook.stats.throughput import cadence
from runbook.tools.inspect import Found, Remark, RemarkCode, RowsFacts, Segment, remarks_on
from runbook.tools.inspect.window import parts_of, segment_of, window_of

if TYPE_CHECKING:
    import pandas as pd

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
    if floor is None or "loss" not in log.frame:
        return
    lowest, step = float("inf"), 0
    for part in parts:
        smooth = part["loss"].rolling(min(_SMOOTH, len(part))).mean().to_numpy(dtype=np.float64)
        if bool(np.isnan(smooth).all()):
            continue
        where = int(np.nanargmin(smooth))
        if smooth[where] < lowest:
            lowest, step = float(smooth[where]), int(part["step"].iloc[where])
    if lowest < floor - _FLOOR_SLACK:
        text = (
            f"the loss reaches {lowest:.3f} at step {step}, below {floor:.3f} ({source}): "
            "the model sees what it should predict, or the data is not what it is said to be"
        )
        yield RemarkCode.BELOW_FLOOR, text


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
    spans = "; ".join(
        f"steps {one.first_step}-{one.last_step} ({one.rows} rows)" for one in segments[:8]
    )
    more = f"; and {len(segments) - 8} more" if len(segments) > 8 else ""
    if again:
        yield RemarkCode.MIXED_RUNS, f"{len(again) + 1} runs in one file: {spans}{more}"
    if elsewhere := len(segments) - 1 - len(again):
        text = (
            f"steps go back or repeat at {elsewhere} places without a restart: two writers, "
            f"or a run resumed into the same file ({spans}{more})"
        )
        yield RemarkCode.STEPS_NOT_INCREASING, text


def account_remarks(
    log: TrainingLog | None,
    ranks: Sequence[RankLog],
    env: Mapping[str, Any] | None,
    duration_s: float | None,
    *,
    exits: Sequence[RankExit],
    gates: pd.DataFrame | None,
    val: pd.DataFrame | None,
    stop: Stop | None = None,
) -> Iterator[Found]:
    """Every account that does not balance, or why none can be drawn.

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
        duration_s=duration_s,
        exits=exits,
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


def ended_launch(
    launch: Mapping[str, Any] | None, result: Mapping[str, Any] | None
) -> tuple[Launch, LaunchResult] | None:
    """A launch and its end, as the launcher wrote both down; None where it did not."""
    try:
        planned = Launch.model_validate((launch or {}).get("launch"))
        return planned, LaunchResult.model_validate(result)
    except ValidationError:
        return None


def completed(known: tuple[Launch, LaunchResult] | None) -> Launch | None:
    """The launch, if it ended as it was planned; else None."""
    if known is None:
        return None
    planned, ended = known
    as_told = planned.stop is None or ended.stopped is not None
    return planned if ended.ok and as_told else None


def as_planned(remarks: Sequence[Remark]) -> Iterator[Remark]:
    """The remarks on a launch that did all that it was to do: it was not meant to have more."""
    for one in remarks:
        short = one.code is RemarkCode.WINDOW_TOO_SHORT
        yield one.model_copy(update={"code": RemarkCode.PLANNED}) if short else one
