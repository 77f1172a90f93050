"""What else in the directory says so: the launcher's plan, and the accounts of a run.

What the launcher had planned is no fault: a stop, or a few steps only.

A directory of another trainer, and a run that has not ended, have no second source to hold their
numbers against: that is one remark, and no suspicion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from runbook.accounts.clocks import FEW_CLOCKED, FEWEST_CLOCKED
from runbook.accounts.registry import Sources, unbalanced
from runbook.accounts.workload import Workload
from runbook.records import Launch, LaunchResult, RankExit, Stop
from runbook.records.evidence import RankLog, TrainingLog
from runbook.tools.inspect.types import Found, Remark, RemarkCode

if TYPE_CHECKING:
    import pandas as pd


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


def completed(launch: Mapping[str, Any] | None, result: Mapping[str, Any] | None) -> Launch | None:
    """The launch of which the two documents say that it ended as it was planned; else None."""
    try:
        planned = Launch.model_validate((launch or {}).get("launch"))
        ended = LaunchResult.model_validate(result)
    except ValidationError:
        return None
    as_told = planned.stop is None or ended.stopped is not None
    return planned if ended.ok and as_told else None


def as_planned(remarks: Sequence[Remark]) -> Iterator[Remark]:
    """The remarks on a launch that did all that it was to do: it was not meant to have more."""
    for one in remarks:
        short = one.code is RemarkCode.WINDOW_TOO_SHORT
        yield one.model_copy(update={"code": RemarkCode.PLANNED}) if short else one
