"""Rows of one launch that has to last: no halt, steady, memory flat and under its limit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from nsa.contract import Event
from phases.kit import SEQUENTIAL_HANG_STEP
from phases.kit.case import Case
from phases.kit.finding import Finding, failed, in_a_row, inconclusive, missing, passed
from phases.kit.measure import (
    against,
    decided,
    estimated,
    file_value,
    log_value,
    rank_value,
    shown_only,
)
from phases.kit.rows import needs_contract
from phases.training.resources import resource_leak, resource_words
from runbook.records import Measurement, Outcome, Reason
from runbook.records.evidence import LaunchEvidence, RankLog
from runbook.records.measurement import MIB_PER_GIB
from runbook.stats.decision import Decision
from runbook.stats.steady import FEWEST_ROWS, steady
from runbook.stats.steady import memory_plateau as projected
from runbook.stats.throughput import step_times

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd


# Where the limit is only shown the projection has none; the leak is still looked for.
_UNLIMITED_MIB = 1e12


def no_halt(case: Case, name: str) -> Finding:
    launch = case.launch(name)
    reasons = [rank.halt_reason for rank in launch.ranks if rank.halt_reason]
    if launch.halted or reasons:
        why = reasons[0] if reasons else launch.result.cause or "no reason recorded"
        follows = "" if launch.result.ok else launch.launch.id
        return failed(
            Reason.HALTED, f"halted: {why}", evidence=launch.result.evidence, follows=follows
        )
    case.completed(name)
    value = rank_value(launch.ranks[0], "halts", 0.0, "halts") if launch.ranks else None
    return passed("no .HALT", measurement=value)


def steadiness(case: Case, name: str) -> Finding:
    """Does a step take as long at the end as at the beginning, without stalls?"""
    log = case.log(name)
    drift, stall = case.limit("drift"), case.limit("stall_share")
    decision = steady(step_times(log), tolerance=drift.value, stall_limit=stall.value)
    steps = log_value(log, "dt_s", 0.0, "s")
    value = estimated(steps, decision, name="step_time_change", unit="share")
    if not (drift.gated and stall.gated):
        return shown_only(value, drift, decision.reason)
    return decided(decision, value, drift)


def with_memory(case: Case, name: str) -> LaunchEvidence:
    """The launch, if each of its ranks told its memory."""
    launch = case.completed(name)
    known = [rank.rank for rank in launch.ranks if not _readings(rank).empty]
    if known != list(range(launch.launch.nproc)):
        raise missing(f"memory of {len(known)} of {launch.launch.nproc} ranks is known")
    return launch


def _readings(rank: RankLog) -> pd.DataFrame:
    """Steps after which the rank told its memory."""
    import pandas as pd

    return pd.DataFrame() if rank.steps is None else rank.steps[rank.steps["mem_mib"].notna()]


def memory_plateau(case: Case, name: str) -> Finding:
    """Of the rank whose memory looks worst; nothing else that they hold may grow either.

    Among those with the same outcome it is the one that may need most.
    """
    if case.profile.own_trainer:
        return _plateau_of_processes(case, name)
    ranks = with_memory(case, name).ranks
    every = {rank.rank: plateau_of(case, rank) for rank in ranks}

    def worst(found: Finding) -> tuple[int, float]:
        """By the upper bound of the projection; nothing is known of a rank with too few rows."""
        bounds = found.measurement.interval if found.measurement else None
        return found.outcome.rank, -(bounds[1] if bounds else 0.0)

    found = min(every.values(), key=worst)
    if found.outcome is Outcome.FAIL:
        return replace(found, clue=_what_grows(case, every))
    told = replace(found, reason=f"{found.reason}{resource_words(case, name)}")
    return resource_leak(case, name) or told


def _what_grows(case: Case, found: Mapping[int, Finding]) -> str:
    """Which memory it is, and on which ranks."""
    what = "tensors on the GPU" if case.profile.has_gpu else "the process (RSS)"
    growing = [rank for rank, one in found.items() if one.outcome is Outcome.FAIL]
    several = "s" if len(growing) > 1 else ""
    only = f"rank{several} {', '.join(map(str, growing))} only"
    return f"The memory of {what} grows on {'every rank' if len(growing) == len(found) else only}."


def plateau_of(case: Case, rank: RankLog) -> Finding:
    rows = _readings(rank).set_index("step")["mem_mib"]
    readings = rank_value(rank, "mem_mib", 0.0, "MiB")
    return projected_plateau(case, rows, readings, who=f"rank {rank.rank}")


def projected_plateau(
    case: Case, mib: pd.Series[float], readings: Measurement, *, who: str, ranks: int = 1
) -> Finding:
    """Of readings by step, of `ranks` together, each of which has the profile's limit."""
    import numpy as np

    limit = case.limit("memory_gib")
    decision = projected(
        mib.index.to_numpy(dtype=float),
        np.asarray(mib, dtype=np.float64),
        float(case.profile.workload.production_steps),
        limit.value * MIB_PER_GIB * ranks if limit.gated else _UNLIMITED_MIB,
    )
    value = estimated(readings, decision, name="memory_projected", unit="MiB projected")
    finding = decided(decision, value)
    grows = finding.code is Reason.BELOW_LIMIT
    code, topic = (Reason.LEAK, "leak") if grows else (finding.code, "")
    title = _growth(decision, who, limit.value * ranks if limit.gated else None) if grows else ""
    return replace(finding, code=code, reason=f"{who}: {finding.reason}", topic=topic, title=title)


def _growth(decision: Decision, who: str, limit_gib: float | None) -> str:
    """The growth in one sentence; empty where a rank is over its limit without growing."""
    slope, end = decision.details["slope_mib_per_step"], decision.estimate
    if not isinstance(slope, float) or slope <= 0 or end is None:
        return ""
    bound = f" (limit {limit_gib:g} GiB)" if limit_gib else ""
    return (
        f"Memory of {who} grows by {slope:.2g} MiB per step: {end / MIB_PER_GIB:.3g} GiB by the "
        f"end of production{bound}."
    )


def memory_limit(case: Case, name: str) -> Finding:
    """On CUDA the most that the allocator ever held; on a CPU the resident memory."""
    if case.profile.own_trainer:
        return _limit_of_processes(case, name)
    launch = with_memory(case, name)
    peaks = {rank.rank: _peak_mib(case, rank) for rank in launch.ranks}
    rank = max(launch.ranks, key=lambda log: peaks[log.rank])
    peak = peaks[rank.rank]
    value = rank_value(rank, "peak_memory", peak / MIB_PER_GIB, "GiB")
    tensors = float(_readings(rank)["mem_mib"].max())
    held = f" held by the allocator at most, {tensors:.0f} MiB of it by tensors"
    text = f"rank {rank.rank} uses most: {peak:.0f} MiB{held if case.profile.has_gpu else ''}"
    return against(value, case.limit("memory_gib"), text)


def _peak_mib(case: Case, rank: RankLog) -> float:
    rows = _readings(rank)
    if not case.profile.has_gpu:
        return float(rows["mem_mib"].max())
    held = rows["reserved_mib"].max() if "reserved_mib" in rows else math.nan
    if not held >= 0:
        raise missing(f"rank {rank.rank} does not say what its allocator held", rank.path)
    return max(float(held), float(rows["mem_mib"].max()))


def _plateau_of_processes(case: Case, name: str) -> Finding:
    """Of the resident memory of all its processes together, before its last row: what it saves at
    its end grows with no step.
    """
    launch = case.completed(name)
    samples = processes_of(launch)
    samples = samples[samples["step"] < samples["step"].max()]
    sums = samples.groupby("mono").agg(step=("step", "max"), mib=("rss_mib", "sum"))
    total = sums[sums["step"] > 0].groupby("step")["mib"].max()
    if len(total) < FEWEST_ROWS:
        reason = f"memory is known after {len(total)} steps, and {FEWEST_ROWS} are needed"
        return inconclusive(Reason.TOO_FEW_SAMPLES, reason, evidence=(launch.path("processes"),))
    ranks = launch.launch.nproc
    return projected_plateau(case, total, _memory(launch, 0.0), who="all processes", ranks=ranks)


def _limit_of_processes(case: Case, name: str) -> Finding:
    """The largest resident memory of one process, on a CPU; nobody tells what a GPU's holds."""
    if case.profile.has_gpu:
        return needs_contract(case)
    launch = case.completed(name)
    peak = float(processes_of(launch)["rss_mib"].max())
    text = f"the largest process had {peak:.0f} MiB"
    return against(_memory(launch, peak / MIB_PER_GIB), case.limit("memory_gib"), text)


def _memory(launch: LaunchEvidence, gib: float) -> Measurement:
    count = 0 if launch.processes is None else len(launch.processes)
    return file_value(launch, "processes", "peak_memory", gib, "GiB", n=count)


def processes_of(launch: LaunchEvidence) -> pd.DataFrame:
    if launch.processes is None or not len(launch.processes):
        raise missing(f"{launch.launch.name}: no process of it was seen", launch.path("processes"))
    return launch.processes


def heartbeats(case: Case, name: str) -> Finding:
    """PASS if every rank began and ended every step, and rank 0 told its progress.

    One step has `step_start`, `progress` and `step_end`; of later ones each begins anew. A launch
    that was ended, by whatever, owes no step after that: its end has a row of its own.
    """
    launch = case.completed(name)
    if not launch.ranks:
        raise missing(f"{name}: no rank wrote a heartbeat", launch.path("console"))
    planned = launch.launch.steps - launch.after
    problems = []
    for rank in launch.ranks:
        wanted = [Event.STEP_START, Event.STEP_END]
        wanted += [Event.PROGRESS] if rank.rank == 0 else []
        for event in wanted:
            seen = rank.counts.get(event, 0)
            if seen < planned and (event is not Event.PROGRESS or not seen):
                problems.append(f"rank {rank.rank} wrote {event} {seen} times in {planned} steps")
    paths = tuple(rank.path for rank in launch.ranks)
    if problems:
        reason = f"{name}: {in_a_row(problems)}"
        return failed(Reason.MISMATCH, reason, evidence=paths, topic="stall")
    value = rank_value(launch.ranks[0], "steps_ended", float(planned), "steps")
    return passed(
        f"progress and step_end of all {planned} steps, each begun by step_start",
        measurement=value,
        evidence=paths,
    )


def past_step_5(case: Case, name: str) -> Finding:
    """PASS if the loss is finite in the steps after the one at which sequential prefill hangs."""
    log = case.log(name, sane=False)
    after = log.frame[log.frame["step"] > SEQUENTIAL_HANG_STEP]
    if after.empty:
        reason = f"{name} has no step beyond {SEQUENTIAL_HANG_STEP}"
        return inconclusive(Reason.TOO_FEW_SAMPLES, reason, evidence=(log.path,))
    losses = after["loss"].to_numpy(dtype=float)
    bad = after["step"][~(abs(losses) < math.inf)]
    if len(bad):
        reason = f"{name}: the loss is not finite at step {int(bad.iloc[0])}"
        return failed(Reason.NON_FINITE, reason, evidence=(log.path,), topic="loss")
    rows = (len(log.frame) - len(after), len(log.frame) - 1)
    value = log_value(log, "loss_last", float(losses[-1]), "nats", rows=rows)
    return passed(f"finite in {len(after)} steps beyond step 5", measurement=value)
