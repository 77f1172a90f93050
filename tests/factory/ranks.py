"""A rank that tells the truth: its evidence, and the heartbeats from which that is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from nsa.contract import Event
from nsa.contract.digests import watched_steps
from runbook.records.evidence import RankLog
from tests.factory.files import Record, record
from tests.factory.told import shadow

_OF_A_STEP = (Event.STEP_START, Event.PROGRESS, Event.STEP_END)


def honest(
    rank: int,
    table: pd.DataFrame,
    steps: pd.DataFrame,
    *,
    token: str,
    proof: Mapping[str, Any],
    moved: Mapping[str, float],
    rate: float,
    twice: Mapping[str, Any],
    ending: Mapping[str, Any] | None = None,
    **told: Any,
) -> RankLog:
    """A rank that did all steps of a CSV and ended well.

    table: the CSV; steps: as `RankLog.steps`; moved, rate: its groups after the last step and the
    largest learning rate; twice: of the steps that are computed again; ending: more of its exit;
    told: other fields of the log.
    """
    first, last = int(table["step"].iloc[0]), int(table["step"].iloc[-1])
    own = {
        "fetched_sum": 7,
        "embedded_sum": 7,
        "moved": moved,
        "largest_lr": rate,
        "updates": [last, last],
        "proof": proof,
        "shadow": shadow(watched_steps(token, first, last)),
        "recomputed": twice,
    }
    given: dict[str, Any] = {
        "path": f"heartbeat_rank{rank}.jsonl",
        "sha256": "",
        "events": 3 * len(table),
        "tokens": frozenset({token}),
        "exit_code": 0,
        "exit_reason": "done",
        "param_hash": "feed",
        "counts": {Event.EXIT: 1, **dict.fromkeys(_OF_A_STEP, len(table))},
        "pids": (100 + rank,),
    }
    return RankLog(
        rank=rank,
        first_step=first,
        last_step=last,
        clock_s=float(table["dt_s"].sum()),
        proof=proof,
        ending={**own, **(ending or {})},
        steps=steps,
        **given | told,
    )


def records(log: RankLog) -> list[Record]:
    """The heartbeats from which this log is read."""
    rows = log.steps.to_dict("records") if log.steps is not None else []
    boot = math.nan if not rows else rows[0]["timed_from"] - 0.01
    own = {"rank": log.rank, "token": next(iter(log.tokens))}
    own |= {"pid": log.pids[0] if log.pids else None}
    begin = {**own, "step": 0, "mono": boot}
    made = [record(Event.BOOT, **begin)]
    if log.proof is not None:
        made.append(record(Event.PROOF, **begin, **log.proof))
    for effect in log.effects:
        made.append(record(Event.EFFECT, **begin, **_of(vars(effect), Event.EFFECT.fields)))
    made += [record(Event.DDP_BUCKETS, **begin, **sizes) for sizes in log.ddp_buckets]
    made += [record(Event.CHECKPOINT, **begin, **saved) for saved in log.checkpoints]
    ended = -math.inf
    for row in rows:
        now = {**own, "step": int(row["step"])}
        # The difference of two sums may fall short of the last one.
        begun, ended = max(ended, row["timed_from"]), row["mono"]
        memory = _of(row, ("rss_mib", "cuda_mib"))
        made += [
            record(Event.STEP_START, mono=begun, **now),
            record(Event.FETCHED, mono=begun + row["fetch_clock_s"], **now),
            record(Event.PROGRESS, mono=ended, **now, **_of(row, Event.PROGRESS.fields)),
            record(Event.STEP_END, mono=ended, **now, **_of(row, Event.STEP_END.fields), **memory),
        ]
    end = {"code": log.exit_code, "reason": log.exit_reason, "param_hash": log.param_hash}
    return [*made, {**made[-1], "event": Event.EXIT, **end, **log.ending}]


def _of(known: Mapping[str, Any], names: Sequence[str]) -> Record:
    return {name: known[name] for name in names if name in known}
