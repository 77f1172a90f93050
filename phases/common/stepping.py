"""Rows of the first steps of a launch: its heartbeats come in order, and the loss stays finite."""

from __future__ import annotations

import math

from nsa.contract import Event
from phases.common.case import Case, Finding, failed, inconclusive, listed, missing, passed
from phases.common.measure import log_value, rank_value
from phases.limits import SEQUENTIAL_HANG_STEP
from runbook.records import Reason


def heartbeats(case: Case, name: str) -> Finding:
    """PASS if every rank began and ended every step, and rank 0 told its progress.

    One step has `step_start`, `progress` and `step_end`; of later ones each begins anew. A launch
    that was ended, by whatever, owes no step after that: its end has a row of its own.
    """
    launch = case.completed(name)
    if not launch.ranks:
        raise missing(f"{name}: no rank wrote a heartbeat", launch.console_path)
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
        reason = f"{name}: {listed(problems)}"
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
