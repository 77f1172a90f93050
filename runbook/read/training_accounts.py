"""Accounts of what the optimizer did, and of the memory that a launch reports.

Like `runbook.read.accounts`: every function returns what does not balance, in words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runbook.read.accounts import COPY_TOLERANCE, Workload, balance
from runbook.read.beside import beside_account
from runbook.read.evaluation_account import evaluation_account
from runbook.read.gates_account import gates_account
from runbook.read.learning import gradient_account, movement_account
from runbook.read.restarts import restart_account
from runbook.read.saved_account import position_account, saved_account
from runbook.read.settings_account import settings_account
from runbook.read.shadow_account import NORM_TOLERANCE, left_over_account, shadow_account
from runbook.read.size_account import size_account
from runbook.read.written_account import written_account
from runbook.records import RankExit
from runbook.records.evidence import RankLog

if TYPE_CHECKING:
    import pandas as pd

# In its first step Adam moves the group that moves most by the rate itself.
FIRST_UPDATE = (0.5, 2.0)
# The rate of a step follows from the config, and the cosine ends at this share of its peak.
COSINE_END = 0.1
# Memory of a process as two readings of one step show it.
MEMORY_TOLERANCE_MIB = 16.0


def book_problems(
    frame: pd.DataFrame,
    ranks: Sequence[RankLog],
    work: Workload,
    env: Mapping[str, Any],
    *,
    gates: pd.DataFrame | None,
    val: pd.DataFrame | None,
    duration_s: float | None,
    exits: Sequence[RankExit] = (),
    given: Mapping[str, str] | None = None,
) -> list[str]:
    """Everything in the tables of a launch, and of its settings, that no second source bears out.

    given: the variables that it was planned with, where there was a plan.
    """
    return [
        *balance(frame, ranks, work, duration_s, exits),
        *beside_account(frame, ranks, env),
        *written_account(exits),
        *restart_account(frame, ranks, lag=int(work.device == "cuda")),
        *rate_account(frame, env),
        *memory_account(ranks, work),
        *gates_account(gates, ranks, work),
        *evaluation_account(val, ranks, work),
        *saved_account(ranks, work.keeping),
        *(position_account(ranks, work.data.accumulation) if work.data else ()),
        *size_account(env),
        *settings_account(ranks, env, given or {}),
    ]


def learning_problems(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """Everything between the gradients and the parameters that does not balance."""
    return [
        *left_over_account(ranks),
        *gradient_account(ranks, work),
        *norm_account(ranks),
        *clip_account(ranks, work),
        *update_account(ranks, work),
        *shadow_account(ranks, work),
        *movement_account(ranks),
    ]


def norm_account(ranks: Sequence[RankLog]) -> list[str]:
    """Every step that reported one had a gradient at all: in no step is its norm 0."""
    problems = []
    for rank in ranks:
        if rank.steps is None or "grad_norm" not in rank.steps:
            continue
        none = rank.steps["step"][rank.steps["grad_norm"] == 0]
        if len(none):
            problems.append(
                f"rank {rank.rank}: the gradient norm is 0 in {len(none)} steps, first "
                f"{none.iloc[0]:.0f}"
            )
    return problems


def clip_account(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """The norm that the trainer tells is that of its gradients, and what exceeds it is clipped."""
    problems = []
    for rank in ranks:
        names = ("norm_told", "norm_before", "norm_after")
        said = [(rank.proof or {}).get(name) for name in names]
        if work.dtype == "fp16" and said[0] is None:
            continue  # under a gradient scaler nothing is clipped twice
        norms = [float(norm) for norm in said if isinstance(norm, int | float) and norm > 0]
        if len(norms) < len(names):
            problems.append(f"rank {rank.rank} does not show that gradients are clipped")
            continue
        told, before, after = norms
        wanted = min(before, work.grad_clip) if work.grad_clip else before
        if abs(told / before - 1) > NORM_TOLERANCE:
            problems.append(f"rank {rank.rank} tells a norm of {told:g} for {before:g}")
        if abs(after / wanted - 1) > NORM_TOLERANCE:
            problems.append(
                f"rank {rank.rank} clips a norm of {before:g} to {after:g}, not to {wanted:g}"
            )
    return problems


def update_account(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """The optimizer counts as many updates as steps, and its first one is as large as the rate.

    fp16 may skip updates while its scaler finds the scale. A resumed launch has no first step.
    """
    problems = []
    for rank in ranks:
        updates, first = (rank.ending.get(name) for name in ("updates", "first_update"))
        if updates is None:
            problems.append(f"rank {rank.rank} does not say how many updates its optimizer made")
        elif updates != [rank.last_step, rank.last_step] and work.dtype != "fp16":
            problems.append(
                f"rank {rank.rank}: the optimizer counts {updates} updates in "
                f"{rank.last_step} steps"
            )
        if rank.first_step != 1 or work.dtype == "fp16":
            continue
        share = first["moved"] / first["lr"] if first and first.get("lr") else math.nan
        if not FIRST_UPDATE[0] <= share <= FIRST_UPDATE[1]:
            problems.append(
                f"rank {rank.rank}: the first step moved no parameter by its rate, but by "
                f"{share:.3g} of it"
            )
    return problems


def rate_account(frame: pd.DataFrame, env: Mapping[str, Any]) -> list[str]:
    """Column lr is what config and schedule make of every step; warm-up rows are the planned ones.

    lr: a linear ramp over warmup_steps, then constant, or a cosine down to a tenth of the peak.
    """
    train, effective = (env.get("config") or {}).get("train") or {}, env.get("effective") or {}
    try:
        peak, ramp = float(train["lr"]), int(train["warmup_steps"])
        shape, total = str(train["lr_schedule"]), int(effective["schedule_steps"])
    except (KeyError, TypeError, ValueError):
        return ["env.json does not say which learning rates were planned"]
    if "lr" not in frame:
        return ["the CSV has no column lr"]
    problems = []
    for step, rate in zip(frame["step"], frame["lr"], strict=True):
        wanted = peak
        if step <= ramp:
            wanted = peak * step / ramp
        elif shape == "cosine":
            progress = min(1.0, (step - ramp) / max(1, total - ramp))
            cosine = 0.5 * (1 + math.cos(math.pi * progress))
            wanted = peak * (COSINE_END + (1 - COSINE_END) * cosine)
        if not abs(rate - wanted) <= COPY_TOLERANCE * peak:
            problems.append(f"lr of step {step} is {rate:.6g}, planned is {wanted:.6g}")
            break
    return problems + _warmup_problems(frame, env)


def _warmup_problems(frame: pd.DataFrame, env: Mapping[str, Any]) -> list[str]:
    """Only a block of a schedule has a warm-up, at its beginning and as long as planned."""
    if "warmup" not in frame:
        return []
    planned = int((env.get("arms") or {}).get("warmup_steps") or 0)
    begins = [name for name in ("block", "arm") if name in frame]
    number = frame.groupby(begins).cumcount() if begins else frame.reset_index().index
    wrong = frame[frame["warmup"].astype(bool) != (number < planned)]
    if not len(wrong):
        return []
    return [
        f"{len(wrong)} steps, first {wrong['step'].iloc[0]}, are marked as warm-up or not against "
        f"the schedule, whose blocks begin with {planned} such steps"
    ]


def memory_account(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """On a CPU every step's memory is what the process has.

    On CUDA it is a peak: no less than what is in use, and no more than what the allocator held.
    """
    problems = []
    for rank in ranks:
        if rank.steps is None or "rss_mib" not in rank.steps:
            problems.append(f"rank {rank.rank} does not say how much memory its steps end with")
            continue
        # A profiler may write its trace between a step's reading and its end.
        steps = rank.steps[rank.steps["alone"].astype(bool)]
        apart = steps["mem_mib"] - steps["rss_mib"]
        wrong = apart.abs() > MEMORY_TOLERANCE_MIB
        if work.device == "cuda":
            wrong = steps["mem_mib"] < steps["cuda_mib"] - MEMORY_TOLERANCE_MIB
            if "reserved_mib" in steps:
                wrong |= steps["reserved_mib"] < steps["mem_mib"] - MEMORY_TOLERANCE_MIB
        if wrong.any():
            row = steps[wrong].iloc[-1]
            problems.append(
                f"rank {rank.rank}: memory of step {row['step']:.0f} is {row['mem_mib']:.0f} MiB, "
                f"but its process has {row['rss_mib']:.0f} and its device {row['cuda_mib']} MiB, "
                f"of {row.get('reserved_mib')} MiB reserved at most"
            )
    return problems
