"""All accounts in one table: what each holds against what, and the row that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from runbook.accounts import (
    between_steps,
    clocks,
    data,
    first_weights,
    gradients,
    model,
    optimizer,
    saves,
    settings,
    tables,
)
from runbook.accounts.workload import Workload
from runbook.records import RankExit, Reason
from runbook.records.evidence import RankLog

if TYPE_CHECKING:
    import pandas as pd

# Columns that have a second source in every rank's heartbeats.
_COPIED = ("step", "loss", "toks_per_s", "grad_norm", "tokens", "dt_s")


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What one launch left that is held against each other.

    `duration_s` and `exits` are what the launcher saw: nothing where there was none. `given`: the
    variables that the launch was planned with, as far as they are known.
    """

    frame: pd.DataFrame
    ranks: Sequence[RankLog]
    work: Workload
    env: Mapping[str, Any]
    gates: pd.DataFrame | None = None
    val: pd.DataFrame | None = None
    duration_s: float | None = None
    exits: Sequence[RankExit] = ()
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def lag(self) -> int:
        """So many steps a device may be behind the host that notes their ends."""
        return int(self.work.device == "cuda")

    @property
    def lacking(self) -> list[str]:
        """Columns that have a second source, and that the CSV has not."""
        return [name for name in _COPIED if name not in self.frame]


class Row(StrEnum):
    """The row of a phase that an account belongs to."""

    ACCOUNTS = "accounts"
    GRADIENTS = "gradients"
    ORACLE = "oracle"


_REASONS = {
    Row.ACCOUNTS: Reason.UNBALANCED,
    Row.GRADIENTS: Reason.NOT_LEARNING,
    Row.ORACLE: Reason.UNBALANCED,
}


@dataclass(frozen=True)
class Account:
    """One account. `holds` says in words what is held against what.

    An account with a `topic` has a remedy of its own: where no other account of its row is off,
    or, if it `leads`, wherever it is off, since what else is off may follow from it. `title` is
    then the row's, of a launch {name}. A `mismatch` is of what was asked for, not of two sources. A
    `copied` account needs every column that heartbeats have too.
    """

    row: Row
    name: str
    holds: str
    problems: Callable[[Sources], Iterable[str]]
    topic: str = ""
    title: str = ""
    mismatch: bool = False
    leads: bool = False
    copied: bool = False

    @property
    def reason(self) -> Reason:
        """Why its row fails where this account is what is off."""
        return Reason.MISMATCH if self.mismatch else _REASONS[self.row]


def _columns(it: Sources) -> Iterable[str]:
    return [f"the CSV has no column {', '.join(it.lacking)}"] if it.lacking else []


def _positions(it: Sources) -> Iterable[str]:
    return saves.position_account(it.ranks, it.work.data.accumulation) if it.work.data else ()


# In the order in which they are told.
ACCOUNTS = (
    Account(
        Row.ACCOUNTS,
        "columns",
        "the CSV's header against the columns that heartbeats tell too",
        _columns,
    ),
    Account(
        Row.ACCOUNTS,
        "processes",
        "one process for each rank, one rank for each process",
        lambda it: tables.process_account(it.ranks),
        copied=True,
    ),
    Account(
        Row.ACCOUNTS,
        "steps",
        "each step once on every rank; the ranks' parameters against each other",
        lambda it: tables.step_account(it.ranks),
        copied=True,
    ),
    Account(
        Row.ACCOUNTS,
        "time",
        "dt_s against each rank's clock, and that against the launcher's",
        lambda it: clocks.time_account(it.frame, it.ranks, it.duration_s, it.exits, it.lag),
        copied=True,
    ),
    Account(
        Row.ACCOUNTS,
        "waiting for data",
        "fetch_s against the marks before and after",
        lambda it: between_steps.fetch_account(it.frame, it.ranks, it.work.device),
        copied=True,
    ),
    Account(
        Row.ACCOUNTS,
        "tokens",
        "tokens embedded and positions with a loss against the plan",
        lambda it: data.token_account(it.frame, it.ranks, it.work),
        copied=True,
    ),
    Account(
        Row.ACCOUNTS,
        "data",
        "digests of what each rank read against other ranks, and against the data as defined",
        lambda it: data.data_account(it.ranks, it.work),
        copied=True,
    ),
    Account(
        Row.ACCOUNTS,
        "copies",
        "training.csv against the heartbeats",
        lambda it: tables.copy_account(it.frame, it.ranks),
        copied=True,
    ),
    Account(
        Row.ACCOUNTS,
        "losses",
        "losses against the same batches computed again",
        lambda it: model.loss_account(it.frame, it.ranks),
        copied=True,
    ),
    Account(
        Row.ACCOUNTS,
        "first loss",
        "the first row's loss against the ranks' proof of its batch",
        lambda it: model.first_loss_account(it.frame, it.ranks, it.work),
        copied=True,
    ),
    Account(
        Row.ACCOUNTS,
        "between steps",
        "what was done beside the steps against what env.json asks for",
        lambda it: between_steps.beside_account(it.frame, it.ranks, it.env),
    ),
    Account(
        Row.ACCOUNTS,
        "writing",
        "rows in the files against heartbeats while the launcher looked",
        lambda it: tables.written_account(it.exits),
    ),
    Account(
        Row.ACCOUNTS,
        "restarts of the time",
        "dt_s after evaluations, saves and second computations against the marks",
        lambda it: between_steps.restart_account(it.frame, it.ranks, lag=it.lag),
    ),
    Account(
        Row.ACCOUNTS,
        "learning rate",
        "lr and warm-up of each row against config and schedule",
        lambda it: optimizer.rate_account(it.frame, it.env),
    ),
    Account(
        Row.ACCOUNTS,
        "memory",
        "memory of each step against the process and the allocator",
        lambda it: tables.memory_account(it.ranks, it.work),
    ),
    Account(
        Row.ACCOUNTS,
        "gates",
        "gates.csv against the gates of steps computed again",
        lambda it: model.gates_account(it.gates, it.ranks, it.work),
    ),
    Account(
        Row.ACCOUNTS,
        "evaluations left out",
        "evaluations made against train.eval_every",
        lambda it: tables.evaluations_left_out(it.ranks, it.work),
        topic="evaluations",
        title="{name} left out evaluations that train.eval_every asks for.",
    ),
    Account(
        Row.ACCOUNTS,
        "evaluations",
        "losses told against their batches, one computed again, and val.csv",
        lambda it: tables.evaluation_account(it.val, it.ranks, it.work),
    ),
    Account(
        Row.ACCOUNTS,
        "checkpoints left out",
        "checkpoints written against train.save_every",
        lambda it: saves.left_out_account(it.ranks, it.work.keeping),
        topic="saves",
        title="{name} left out checkpoints that train.save_every asks for.",
    ),
    Account(
        Row.ACCOUNTS,
        "checkpoints",
        "tensors read back against those saved; checkpoints kept against the config",
        lambda it: saves.saved_account(it.ranks, it.work.keeping),
    ),
    Account(
        Row.ACCOUNTS,
        "places in the data",
        "where ranks go on against the step that was saved",
        _positions,
    ),
    Account(
        Row.ACCOUNTS,
        "size",
        "the count of parameters against the shape of the model",
        lambda it: first_weights.size_account(it.env),
    ),
    Account(
        Row.ACCOUNTS,
        "settings",
        "buckets, timeout and threads of each rank against what it was given",
        lambda it: settings.settings_account(it.ranks, it.env, it.given),
        topic="settings",
        title="{name} does not run with what it was given.",
        mismatch=True,
    ),
    Account(
        Row.GRADIENTS,
        "left over",
        "the gradient that a step begins with against none",
        lambda it: gradients.left_over_account(it.ranks),
        topic="left_over",
        leads=True,
    ),
    Account(
        Row.GRADIENTS,
        "gradients",
        "known gradients sent by every rank against their mean",
        lambda it: gradients.gradient_account(it.ranks, it.work),
    ),
    Account(
        Row.GRADIENTS,
        "norms",
        "the norm of every step's gradient against 0",
        lambda it: gradients.norm_account(it.ranks),
    ),
    Account(
        Row.GRADIENTS,
        "clipping",
        "norms told against those before and after clipping",
        lambda it: gradients.clip_account(it.ranks, it.work),
    ),
    Account(
        Row.GRADIENTS,
        "updates",
        "the optimizer's count of updates, and the first one, against steps and rate",
        lambda it: optimizer.update_account(it.ranks, it.work),
    ),
    Account(
        Row.GRADIENTS,
        "AdamW",
        "weights, moments and gradients of watched steps against the equation in float64",
        lambda it: optimizer.shadow_account(it.ranks, it.work),
    ),
    Account(
        Row.GRADIENTS,
        "movement",
        "how far parameters moved against the learning rate, and against other ranks",
        lambda it: optimizer.movement_account(it.ranks),
    ),
    Account(
        Row.ORACLE,
        "first weights",
        "the weights before the first step against their distribution",
        lambda it: first_weights.first_weights_account(it.ranks, it.env),
        topic="first_weights",
        mismatch=True,
        leads=True,
    ),
    Account(
        Row.ORACLE,
        "oracle",
        "the first and the last batch against the equations in float64",
        lambda it: model.oracle_account(it.ranks, it.work),
        topic="oracle",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Unbalanced:
    """The accounts that are off, each with what does not balance."""

    found: tuple[tuple[Account, tuple[str, ...]], ...]

    def __bool__(self) -> bool:
        return bool(self.found)

    @property
    def problems(self) -> list[str]:
        """Everything that does not balance, in words."""
        return [text for _, texts in self.found for text in texts]

    @property
    def account(self) -> Account | None:
        """The one that all of it is about, or may follow from; None where that is none."""
        off = [account for account, _ in self.found]
        leading = next((account for account in off if account.leads), None)
        return leading or (off[0] if len(off) == 1 else None)


def unbalanced(sources: Sources, *rows: Row) -> Unbalanced:
    """What does not balance of the accounts of these rows; of all, where none is named."""
    chosen = [one for one in ACCOUNTS if not rows or one.row in rows]
    drawn = [one for one in chosen if not (one.copied and sources.lacking)]
    told = ((one, tuple(one.problems(sources))) for one in drawn)
    return Unbalanced(found=tuple(one for one in told if one[1]))
