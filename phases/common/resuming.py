"""Rows of checkpoints: is there room, is writing fast enough, and does a resumed launch go on?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from phases.common.case import (
    Case,
    Finding,
    Unanswerable,
    failed,
    incomplete,
    invalid,
    missing,
    passed,
)
from phases.common.measure import against, derived, log_value, rank_value
from phases.limits import CHECKPOINT_SHARE, CHECKPOINTS_KEPT, DISK_MARGIN, RESUMED_TOLERANCE
from runbook.records import Measurement, Reason
from runbook.records.evidence import RankLog

# Of a parameter: itself and two moments of Adam, in fp32.
_BYTES_OF_A_PARAMETER = 12
_BYTES_PER_GIB = 1024.0**3


def storage(case: Case, names: Sequence[str]) -> Finding:
    """PASS if what is free where the run writes holds every checkpoint of the production run."""
    free_fact, free = case.known("disk.free_gib")
    size = _checkpoint_gib(case, names[0])
    count = CHECKPOINTS_KEPT
    needed = count * size * DISK_MARGIN
    value = derived(free, name="disk_free", value=float(free.value), unit="GiB")
    text = (
        f"{float(free.value):.1f} GiB free, {count} checkpoints of {size:.2f} GiB "
        f"(12 bytes a parameter) need {needed:.1f} GiB with a margin of {DISK_MARGIN - 1:.0%}"
    )
    if float(free.value) >= needed:
        return passed(text, measurement=value)
    return invalid(
        Reason.WRONG_ENVIRONMENT,
        text,
        measurement=value,
        evidence=(free_fact.path,),
        topic="disk",
    )


def checkpoint_time(case: Case, names: Sequence[str]) -> Finding:
    """The time of writing a checkpoint, as a share of the steps between two of production's."""
    from runbook.stats import step_times

    written = [(name, rank) for name in names for rank in case.completed(name).ranks]
    slow = max(
        ((_slowest(rank), name, rank) for name, rank in written if rank.checkpoints),
        key=lambda one: one[0],
        default=None,
    )
    if slow is None:
        raise missing(f"{', '.join(names)} wrote no checkpoint")
    seconds, name, rank = slow
    every = _save_every(case, name)
    between = every * statistics.median(step_times(case.log(name)).tolist())
    share = seconds / (seconds + between)
    base = rank_value(rank, "checkpoint_write", seconds, "s")
    value = derived(base, name="checkpoint_share", value=share, unit="", n=len(rank.checkpoints))
    text = f"{seconds:.2f} s to write a checkpoint ({name}, rank {rank.rank}), every {every} steps"
    return against(value, case.limit(CHECKPOINT_SHARE), text)


def resumed(case: Case, first: str, second: str) -> Finding:
    """PASS if a launch from a checkpoint trains the same steps to the same losses.

    On a CPU bit for bit; on a GPU, whose sums are in no fixed order, within the rounding.
    """
    before, after = case.log(first), case.log(second)
    both = before.frame.merge(after.frame, on="step", suffixes=("", "_again"))
    begun = case.launch(second).after
    wanted = list(range(begun + 1, case.launch(second).launch.steps + 1))
    if both["step"].tolist() != wanted or len(after.frame) != len(wanted):
        reason = f"{second} trained other steps than {wanted[0]} to {wanted[-1]} of {first}"
        return invalid(Reason.MISMATCH, reason, evidence=(before.path, after.path))
    apart = (both["loss_again"] / both["loss"] - 1.0).abs()
    largest, allowed = float(apart.max()), RESUMED_TOLERANCE if case.profile.has_gpu else 0.0
    base = log_value(after, "loss_last", float(after.frame["loss"].iloc[-1]), "nats")
    value = _both(base, log_value(before, "loss", 0.0, "nats"), largest)
    told = _written(case.completed(first).ranks)
    if largest <= allowed:
        how = "bit for bit" if largest == 0.0 else f"within {largest:.2g}"
        reason = f"steps {wanted[0]} to {wanted[-1]} give the same losses, {how}{told}"
        return passed(reason, measurement=value)
    step = int(both["step"][apart > allowed].iloc[0]) if largest > allowed else wanted[0]
    reason = (
        f"{second} goes on from step {begun}, and from step {step} its loss is not {first}'s: "
        f"it differs by up to {largest:.3g} of it, allowed {allowed:g}"
    )
    return failed(Reason.MISMATCH, reason, measurement=value, topic="resume")


def _both(base: Measurement, other: Measurement, largest: float) -> Measurement:
    return derived(base, name="resumed_loss", value=largest, unit="", also=[base, other])


def _written(ranks: Sequence[RankLog]) -> str:
    seconds = [_slowest(rank) for rank in ranks if rank.checkpoints]
    return f"; the checkpoint took {max(seconds):.2f} s to write" if seconds else ""


def _slowest(rank: RankLog) -> float:
    return max(float(one.get("seconds") or 0.0) for one in rank.checkpoints)


def _checkpoint_gib(case: Case, name: str) -> float:
    count = _effective(case, name).get("n_params")
    if not isinstance(count, int) or count < 1:
        raise missing(f"{name}: env.json does not say how many parameters it trains")
    return count * _BYTES_OF_A_PARAMETER / _BYTES_PER_GIB


def _save_every(case: Case, name: str) -> int:
    """Steps between two checkpoints of production, as its config has them."""
    if case.profile.plan is None:
        raise Unanswerable(incomplete(Reason.NOT_RUN, "no plan says how often one is written"))
    for other in case.profile.plan.phases:
        settings = case.profile.phases[other]
        if settings.stage is not None and settings.stage.needs_go:
            return max(1, settings.steps // settings.stage.legs)
    return int(((case.env(name).get("config") or {}).get("train") or {}).get("save_every") or 0)


def _effective(case: Case, name: str) -> dict[str, Any]:
    return dict(case.env(name).get("effective") or {})
