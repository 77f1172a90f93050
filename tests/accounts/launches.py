"""A launch of two ranks that tells the truth in all its files, and ways to make it lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from nsa.contract.digests import recomputed_steps
from runbook.accounts import Workload, model, tables
from runbook.accounts.registry import Row, Sources, unbalanced
from runbook.records import RankExit
from runbook.records.evidence import RankLog
from tests.factory import ranks as made
from tests.factory.told import DATA, ORACLE, TEXT, first_pass, recomputed, told_steps
from tests.said import hold

STEPS, RANKS, PER_RANK = 60, 2, 128
WORK = Workload(
    nproc=RANKS,
    step_tokens=PER_RANK,
    pass_tokens=PER_RANK,
    seq_len=128,
    block=16,
    wire="bf16",
    data=DATA,
    dtype="bf16",
    device="cuda",
    layers=12,
    grad_clip=1.0,
    steps=STEPS,
)
Ranks = tuple[RankLog, ...]
EXITS = (RankExit(rank=0, code=0, said_s=0.6, watched_s=0.9), RankExit(rank=1, code=0))


def rows() -> pd.DataFrame:
    """A CSV with step times of 10 ms that jitter by a fifth."""
    dt = np.random.default_rng(3).uniform(0.008, 0.012, STEPS)
    return pd.DataFrame(
        {
            "step": range(1, STEPS + 1),
            "loss": np.linspace(5.6, 2.0, STEPS),
            "toks_per_s": RANKS * PER_RANK / dt,
            "tokens": RANKS * PER_RANK,
            "dt_s": dt,
            "arm": "",
            "grad_norm": np.linspace(3.0, 1.0, STEPS),
            "fetch_s": 2.5e-4,
            "block": 0,
        }
    )


def proof(number: int) -> dict[str, Any]:
    """What a rank proves, before its first step and after its last one."""
    return first_pass(
        5.6 + 0.01 * (number - 0.5),
        positions=PER_RANK,
        own_gradient={"embedding": 1e-3, "attention.k_cmp": 1e-6},
        wire="bf16",
        text=TEXT,
        norm_told=4.0,
        norm_before=4.0,
        oracle={**ORACLE, "attention": 0.005, "layers": 12.0},
    )


def rank(number: int, table: pd.DataFrame) -> RankLog:
    """The heartbeats of a rank that tells the same; its clock reads 1 ms late now and then.

    The loss is agreed by all ranks, but each times its own steps.
    """
    late = np.where(table["step"] % 7 == 0, 0.001, 0.0)
    steps = told_steps(
        table,
        began=500.0 + 1e-5 * number,
        data=[DATA.of_step(number, step) for step in table["step"]],
        embedded=PER_RANK,
        mem_mib=300.0,
        reserved_mib=340.0,
        rss_mib=2000.0,
        cuda_mib=290.0,
        toks_per_s=table["toks_per_s"] * (1 + 0.01 * number),
    )
    steps["mono"] += late
    return made.honest(
        number,
        table,
        steps,
        token="t",
        proof=proof(number),
        moved={"embedding": 0.01, "norm": 0.02},
        rate=3e-3,
        twice=recomputed(recomputed_steps("t", 1, STEPS), table),
        pids=(40 + number,),
    )


def all_accounts(table: pd.DataFrame, ranks: Ranks, work: Workload = WORK) -> list[str]:
    """Everything that does not balance."""
    told = sources(table, ranks, work, float(rows()["dt_s"].sum()) + 5.0, EXITS)
    found = unbalanced(told, Row.ACCOUNTS).found
    copied = (texts for one, texts in found if one.copied or one.check is tables.column_account)
    problems = [
        *(text for texts in copied for text in texts),
        *unbalanced(sources(table, ranks, work), Row.GRADIENTS).problems,
        *tables.memory_account(ranks, work),
        *model.oracle_account(ranks, work),
    ]
    hold(problems)
    return problems


def sources(
    table: pd.DataFrame,
    ranks: Ranks,
    work: Workload = WORK,
    duration_s: float | None = None,
    exits: Sequence[RankExit] = (),
) -> Sources:
    return Sources(frame=table, ranks=ranks, work=work, env={}, duration_s=duration_s, exits=exits)


def honest() -> tuple[pd.DataFrame, Ranks]:
    table = rows()
    return table, tuple(rank(number, table) for number in range(RANKS))


def changed(ranks: Ranks, number: int, **values: Any) -> Ranks:
    return tuple(replace(log, **values) if log.rank == number else log for log in ranks)


def steps_of(ranks: Ranks, number: int, **values: Any) -> Ranks:
    steps = ranks[number].steps
    return changed(ranks, number, steps=steps.assign(**values))


def proof_of(ranks: Ranks, number: int, **values: Any) -> Ranks:
    return changed(ranks, number, proof={**(ranks[number].proof or {}), **values})


def ending_of(ranks: Ranks, number: int, **values: Any) -> Ranks:
    return changed(ranks, number, ending={**ranks[number].ending, **values})
