"""All accounts in one table: the row that each belongs to, and what is told where it is off."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from runbook.accounts import (
    Workload,
    between_steps,
    clocks,
    data,
    first_weights,
    gradients,
    model,
    tables,
)
from runbook.records import RankExit, Reason
from runbook.records.evidence import Frame, RankLog


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What one launch left that is held against each other, by the names that accounts ask for.

    `duration_s` and `exits` are what the launcher saw: nothing where there was none. `given`: the
    variables that the launch was planned with, as far as they are known.
    """

    frame: Frame
    ranks: Sequence[RankLog]
    work: Workload
    env: Mapping[str, Any]
    gates: Frame | None = None
    val: Frame | None = None
    duration_s: float | None = None
    exits: Sequence[RankExit] = ()
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def lag(self) -> int:
        """So many steps a device may be behind the host that notes their ends."""
        return int(self.work.device == "cuda")


class Row(StrEnum):
    """The row of a phase that an account belongs to."""

    ACCOUNTS = "accounts"
    GRADIENTS = "gradients"
    ORACLE = "oracle"


# What is not as it was asked for; in all others two sources differ.
_MISMATCHES = ("selection", "settings", "first_weights")
# What else is off may follow from these.
_LEADING = ("left_over", "own_loss", "exchange", "first_weights")


@dataclass(frozen=True)
class Account:
    """One account: `check` asks for what it needs of sources or their work, returns what is off.

    An account with a `topic` has a remedy and a title of its own: where no other account of its
    row is off, or, if it leads, wherever it is off. A `copied` account needs every column of
    training.csv that heartbeats have too.
    """

    row: Row
    check: Callable[..., Iterable[str]]
    topic: str = ""
    copied: bool = False

    @property
    def reason(self) -> Reason:
        """Why its row fails where this account is what is off."""
        if self.topic in _MISMATCHES:
            return Reason.MISMATCH
        return Reason.NOT_LEARNING if self.row is Row.GRADIENTS else Reason.UNBALANCED

    def problems(self, sources: Sources) -> tuple[str, ...]:
        """What does not balance, in words."""
        asked = inspect.signature(self.check).parameters
        told = {**vars(sources.work), **vars(sources), "lag": sources.lag}
        return tuple(self.check(**{name: told[name] for name in asked}))


# In the order in which they are told.
ACCOUNTS = (
    Account(Row.ACCOUNTS, tables.column_account),
    Account(Row.ACCOUNTS, tables.process_account, copied=True),
    Account(Row.ACCOUNTS, tables.step_account, copied=True),
    Account(Row.ACCOUNTS, clocks.time_account, copied=True),
    Account(Row.ACCOUNTS, between_steps.fetch_account, copied=True),
    Account(Row.ACCOUNTS, data.token_account, "trained_on", copied=True),
    Account(Row.ACCOUNTS, data.data_account, "trained_on", copied=True),
    Account(Row.ACCOUNTS, tables.copy_account, copied=True),
    Account(Row.ACCOUNTS, tables.summed_account, copied=True),
    Account(Row.ACCOUNTS, model.loss_account, "again", copied=True),
    Account(Row.ACCOUNTS, model.first_loss_account, "again", copied=True),
    Account(Row.ACCOUNTS, gradients.told_norm_account, copied=True),
    Account(Row.ACCOUNTS, between_steps.beside_account),
    Account(Row.ACCOUNTS, tables.written_account),
    Account(Row.ACCOUNTS, between_steps.restart_account),
    Account(Row.ACCOUNTS, gradients.rate_account, "schedule"),
    Account(Row.ACCOUNTS, gradients.warmup_account),
    Account(Row.ACCOUNTS, tables.memory_account),
    Account(Row.ACCOUNTS, model.gates_account),
    Account(Row.ACCOUNTS, model.selection_account, "selection"),
    Account(Row.ACCOUNTS, model.flops_account),
    Account(Row.ACCOUNTS, tables.evaluations_left_out, "evaluations"),
    Account(Row.ACCOUNTS, data.held_out_account, "evaluated"),
    Account(Row.ACCOUNTS, tables.evaluation_account, "evaluated"),
    Account(Row.ACCOUNTS, tables.checkpoints_left_out, "saves"),
    Account(Row.ACCOUNTS, tables.saved_account, "saved"),
    Account(Row.ACCOUNTS, tables.position_account, "saved"),
    Account(Row.ACCOUNTS, first_weights.size_account),
    Account(Row.ACCOUNTS, tables.timeout_account, "settings"),
    Account(Row.ACCOUNTS, tables.thread_account, "settings"),
    Account(Row.GRADIENTS, gradients.left_over_account, "left_over"),
    Account(Row.GRADIENTS, gradients.gradient_account),
    Account(Row.GRADIENTS, gradients.logit_account, "own_loss"),
    Account(Row.GRADIENTS, gradients.exchange_account, "exchange"),
    Account(Row.GRADIENTS, gradients.norm_account),
    Account(Row.GRADIENTS, gradients.clip_account),
    Account(Row.GRADIENTS, gradients.update_account, "updates"),
    Account(Row.GRADIENTS, gradients.shadow_account),
    Account(Row.GRADIENTS, gradients.movement_account),
    Account(Row.ORACLE, first_weights.first_weights_account, "first_weights"),
    Account(Row.ORACLE, model.oracle_account, "oracle"),
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
        """The one that all of it is about, or may follow from, or the first of those that have one
        remedy; None where that is none."""
        off = [account for account, _ in self.found]
        leading = next((account for account in off if account.topic in _LEADING), None)
        alike = len({account.topic for account in off}) == 1
        return leading or (off[0] if len(off) == 1 or (alike and off[0].topic) else None)


def unbalanced(sources: Sources, *rows: Row) -> Unbalanced:
    """What does not balance of the accounts of these rows; of all, where none is named."""
    lacks = bool(tables.column_account(sources.frame))
    drawn = [
        one for one in ACCOUNTS if (not rows or one.row in rows) and not (lacks and one.copied)
    ]
    told = ((one, one.problems(sources)) for one in drawn)
    return Unbalanced(found=tuple(one for one in told if one[1]))
