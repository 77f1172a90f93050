"""Accounts of evaluations: the loss that is told against its batches, one of them computed again.

Like `runbook.read.accounts`: every function returns what does not balance, in words. On which rows
an evaluation was made is `data_account`'s to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nsa.contract.sampling import drawn_batch
from runbook.read.accounts import COPY_TOLERANCE, LOSS_TOLERANCE, Workload
from runbook.records.evidence import RankLog

if TYPE_CHECKING:
    import pandas as pd


def evaluation_account(
    val: pd.DataFrame | None, ranks: Sequence[RankLog], work: Workload
) -> list[str]:
    """Every evaluation is the mean of all planned batches, of which one was computed again.

    `val` is val.csv, which has to tell the same steps and losses as rank 0.
    """
    problems = evaluations_left_out(ranks, work)
    problems += [
        f"rank {rank.rank}'s evaluation after step {told.get('step')} {text}"
        for rank in ranks
        for told in rank.evaluations
        for text in (*_own_problems(told, work), *_again_problems(rank, told, work))
    ]
    if any(rank.evaluations for rank in ranks):
        problems += _mean_problems(ranks)
        problems += _table_problems(val, ranks)
    return problems


def evaluations_left_out(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """Steps that lack their evaluation; of the last step the end of the launch decides."""
    problems = []
    for rank in ranks:
        if not work.eval_every or rank.steps is None:
            continue
        trained = rank.steps["step"].iloc[:-1]
        due = set(trained[trained % work.eval_every == 0].astype(int))
        made = {told.get("step") for told in rank.evaluations}
        if missing := sorted(due - made):
            problems.append(
                f"rank {rank.rank} left out {len(missing)} of {len(due)} evaluations that "
                f"train.eval_every={work.eval_every} asks for, first after step {missing[0]}"
            )
    return problems


def _own_problems(told: Mapping[str, Any], work: Workload) -> Iterator[str]:
    """Batches and tokens that are not the planned ones."""
    losses = told.get("losses") or ()
    if len(losses) != work.eval_batches:
        yield f"tells the losses of {len(losses)} batches, planned are {work.eval_batches}"
    tokens = work.eval_batches * work.pass_tokens
    if told.get("embedded") != tokens:
        yield f"embedded {told.get('embedded')} tokens, not {tokens}"


def _again_problems(rank: RankLog, told: Mapping[str, Any], work: Workload) -> Iterator[str]:
    """A drawn batch whose loss is another when it is computed a second time."""
    again: Mapping[str, Any] = told.get("again") or {}
    losses, step, batch = told.get("losses") or (), told.get("step"), again.get("batch")
    # One token; that it is the launch's own is another row's to say.
    drawn = {drawn_batch(t, rank.rank, step or 0, work.eval_batches) for t in rank.tokens}
    if batch not in drawn or not batch < len(losses):
        yield f"computed batch {batch} a second time, drawn is {', '.join(map(str, drawn))}"
        return
    loss = again.get("loss")
    if not _apart(losses[batch], loss) <= LOSS_TOLERANCE:
        told_of = f"{_shown(losses[batch])} for batch {batch}"
        yield f"tells a loss of {told_of}, computed again {_shown(loss)}"


def _mean_problems(ranks: Sequence[RankLog]) -> Iterator[str]:
    """Losses that are not the mean over ranks and batches."""
    steps = [[told.get("step") for told in rank.evaluations] for rank in ranks]
    if any(own != steps[0] for own in steps):
        yield "the ranks tell evaluations after different steps"
        return
    for together in zip(*(rank.evaluations for rank in ranks), strict=True):
        every = [loss for told in together for loss in told.get("losses") or ()]
        mean = sum(every) / len(every) if every else math.nan
        for rank, told in zip(ranks, together, strict=True):
            if not _apart(told.get("loss"), mean) <= COPY_TOLERANCE * abs(mean):
                yield (
                    f"rank {rank.rank} tells a validation loss of {_shown(told.get('loss'))} after "
                    f"step {told.get('step')}, the mean of {len(every)} batches is {_shown(mean)}"
                )


def _table_problems(val: pd.DataFrame | None, ranks: Sequence[RankLog]) -> Iterator[str]:
    """What val.csv says otherwise than rank 0, which writes it."""
    read = val[["step", "loss"]] if val is not None and "loss" in val else None
    rows = [] if read is None else list(read.itertuples(index=False, name=None))
    told = [(one.get("step"), one.get("loss")) for one in ranks[0].evaluations]
    if [step for step, _ in rows] != [step for step, _ in told]:
        yield f"val.csv has {len(rows)} evaluations, rank {ranks[0].rank} tells of {len(told)}"
        return
    for (step, loss), (_, said) in zip(rows, told, strict=True):
        if not _apart(loss, said) <= COPY_TOLERANCE * abs(loss):
            place = f"after step {step:.0f}, the heartbeats {_shown(said)}"
            yield f"val.csv has a loss of {_shown(loss)} {place}"


def _apart(one: object, other: object) -> float:
    """How far two numbers lie apart; NaN, which is near nothing, where one is none."""
    if not (isinstance(one, int | float) and isinstance(other, int | float)):
        return math.nan
    return abs(one - other)


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)
