"""Checkpoints: they hold what the run held, and the right ones were kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from nsa.contract import Event, checkpoint_step
from runbook.accounts import due
from runbook.accounts.workload import Keeping, Workload
from runbook.records.evidence import RankLog

# A long run saves hundreds of times.
_NAMED = 8


def saved_account(ranks: Sequence[RankLog], keeping: Keeping) -> list[str]:
    """Rank 0 has read some tensors of each checkpoint back, and those that were to go went.

    Where one was not written at all, `checkpoints_left_out` says so.
    """
    if not ranks or not ranks[0].checkpoints or checkpoints_left_out(ranks, keeping):
        return []
    newest = PurePath(str(ranks[0].checkpoints[-1].get("path"))).name
    told: Mapping[str, Any] = ranks[0].ending.get("saved") or {}
    if not told.get("elements"):
        return [f"nothing of the checkpoint {newest} was read back"]
    if why := told.get("unreadable"):
        return [
            f"checkpoints of the steps {_listed(told.get('wrong'))}: not to be read back: {why}"
        ]
    if told.get("step") != checkpoint_step(newest):
        return [f"step {told.get('step')} was read back, the newest checkpoint is {newest}"]
    if told.get("other") != 0:
        return [
            f"{newest}: {told.get('other')} of {told['elements']} elements read back are not what "
            f"the run held when the save began ({', '.join(map(str, told.get('tensors') or ()))})"
        ]
    return [
        *_earlier_ones(ranks[0], told),
        *_other_ones_kept(ranks[0], told.get("kept"), keeping),
    ]


def position_account(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """Every rank goes on behind the last micro-batch of the step that was saved.

    Of generated data, whose position is the number of micro-batches; what place in documents is
    the right one nobody else knows.
    """
    if work.data is None:
        return []
    told: Mapping[str, Any] = (ranks[0].ending.get("saved") if ranks else None) or {}
    if not told or told.get("unreadable"):  # `saved_account` says why
        return []
    step, found = told.get("step"), told.get("positions")
    if not isinstance(found, list) or len(found) != len(ranks) or not isinstance(step, int):
        return ["the checkpoint does not tell where each rank goes on in its data"]
    wanted = {"step": step * work.data.accumulation}
    return [
        f"rank {rank} goes on from step {step} at {place} in its data, behind that step is {wanted}"
        for rank, place in enumerate(found)
        if place != wanted
    ]


def _earlier_ones(rank: RankLog, told: Mapping[str, Any]) -> list[str]:
    """Every checkpoint was read back, as the next save began, and held what was saved."""
    read, written = told.get("read"), rank.counts.get(Event.CHECKPOINT, len(rank.checkpoints))
    if read != written:
        return [f"{read} of the {written} checkpoints that were written were read back"]
    if wrong := told.get("wrong"):
        return [
            f"checkpoints of the steps {_listed(wrong)} did not hold what the run held when their "
            "saves began"
        ]
    return []


def _written(rank: RankLog) -> list[int]:
    """The steps whose checkpoints the rank says it has written."""
    names = [PurePath(str(one.get("path"))).name for one in rank.checkpoints]
    return [step for step in map(checkpoint_step, names) if step is not None]


def checkpoints_left_out(ranks: Sequence[RankLog], keeping: Keeping) -> list[str]:
    """Steps that lack their checkpoint, as far as rank 0 tells."""
    if not ranks:
        return []
    written = _written(ranks[0])
    if missing := sorted(due(ranks[0], keeping.saves) - set(written)):
        others = f"those of {_listed(sorted(written))} were" if written else "none was"
        return [
            f"no checkpoint of step {_listed(missing)} was written, train.save_every="
            f"{keeping.saves} asks for it; {others}"
        ]
    return []


def _other_ones_kept(rank: RankLog, kept: object, keeping: Keeping) -> list[str]:
    """Checkpoints on the disk that are not those which config and evaluations leave."""
    written = _written(rank)
    losses = {
        step: float(loss)
        for told in rank.evaluations
        if isinstance(step := told.get("step"), int)
        and isinstance(loss := told.get("loss"), int | float)
    }
    wanted = keeping.stay(written, losses)
    if kept == wanted:
        return []
    evaluated = [f"{losses[step]:.4f} at {step}" for step in sorted(written) if step in losses]
    of = f"; validation loss {', '.join(evaluated)}" if keeping.best and evaluated else ""
    return [
        f"checkpoints of the steps {_listed(kept)} were kept, train.keep_last={keeping.last}, "
        f"keep_every={keeping.every} and keep_best={str(keeping.best).lower()} keep "
        f"{_listed(wanted)}{of}"
    ]


def _listed(steps: object) -> str:
    if not isinstance(steps, list) or not steps:
        return str(steps)
    more = f" and {len(steps) - _NAMED} more" if steps[_NAMED:] else ""
    return f"{', '.join(map(str, steps[:_NAMED]))}{more}"
