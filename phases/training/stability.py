"""Rows of one launch that has to last: no halt, steady, its ranks heard, its gates healthy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from nsa.contract import Event
from phases.kit import SEQUENTIAL_HANG_STEP
from phases.kit.case import Case
from phases.kit.finding import Finding, failed, in_a_row, inconclusive, invalid, missing, passed
from phases.kit.measure import (
    decided,
    estimated,
    file_value,
    log_value,
    rank_value,
    shown_only,
    steps_of,
)
from runbook.accounts.model import other_selection
from runbook.records import Measurement, Reason
from runbook.records.evidence import Frame, LaunchEvidence
from runbook.stats.series import steady
from runbook.stats.throughput import step_times

# A stretch without readings is suspicious beyond so many of the usual ones.
_GAP = 3
# Column of gates.csv, its unit, and what it is called.
_SELECTION = (
    ("sel_blocks_mean", "blocks", "blocks that a query attends to"),
    ("sel_forced_share", "share", "part of them that is forced"),
)


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
    text = f"progress and step_end of all {planned} steps, each begun by step_start"
    return passed(text, measurement=value, evidence=paths)


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


# -- gates and selection of the three branches, from gates.csv ------------------------------------


def gates(case: Case, name: str) -> Finding:
    """Collapsed: entropy too low or one gate too large in N readings one after the other.

    A selection of another size than the config means is a FAIL too; no document limits it further.
    """
    launch = case.completed(name)
    frame = launch.gates
    if frame is None or frame.empty:
        raise missing("no gate health was recorded")
    if absent := [name for name in ("entropy", "max_gate") if name not in frame]:
        reason = f"{launch.path('gates')}: the header lacks {', '.join(absent)}"
        return invalid(Reason.DAMAGED_ARTIFACT, reason, evidence=(launch.path("gates"),))
    low, high = case.limit("gate_entropy_min"), case.limit("gate_max_share")
    patience = case.limit("gate_collapse_readings")
    if gap := _unread(frame, launch.after, launch.asked, patience.value):
        return inconclusive(Reason.TOO_FEW_SAMPLES, gap, evidence=(launch.path("gates"),))
    env: Mapping[str, Any] = launch.env or {}
    shape = (env.get("config") or {}).get("nsa") or {}
    if wrong := other_selection(frame, shape, (env.get("effective") or {}).get("seq_len")):
        paths = (launch.path("gates"), launch.path("env"))
        return failed(Reason.MISMATCH, wrong, evidence=paths, topic="selection")
    entropy = frame["entropy"].to_numpy(dtype=float)
    largest = frame["max_gate"].to_numpy(dtype=float)
    bad = [
        not (low.holds(one) and high.holds(other))
        for one, other in zip(entropy.tolist(), largest.tolist(), strict=True)
    ]
    value = file_value(
        launch,
        "gates",
        "gate_entropy_min",
        float(entropy.min()),
        n=len(frame),
        window=steps_of(frame),
        note=f"largest gate share {largest.max():.3f}",
    )
    text = f"lowest entropy {entropy.min():.3f}, largest gate share {largest.max():.3f}"
    read = selection(launch)
    if len(read) < len(_SELECTION):
        text += "; no statistics of the selection (NSA_DISABLE_AUX_STATS)"
    else:
        blocks, forced = (float(one.value) for one in read)
        text += f"; a query attends to {blocks:.4g} blocks, {forced:.0%} of them forced"
    start, readings = _longest_run(bad)
    if not patience.holds(readings):
        step = int(frame["step"].iloc[start])
        reason = f"the gates collapse from step {step} ({readings} readings in a row): {text}"
        return failed(Reason.BELOW_LIMIT, reason, measurement=value, limit=low)
    if any(bad):
        text += f"; {sum(bad)} bad reading(s), never {patience.value:g} in a row"
        return passed(text, measurement=value)
    return passed(f"{text}, allowed {high.value:g}", measurement=value, limit=low)


def selection(launch: LaunchEvidence) -> tuple[Measurement, ...]:
    """What the selection read, as means over the readings; empty where no statistics were taken."""
    frame = launch.gates
    if frame is None:
        return ()
    found = []
    for column, unit, note in _SELECTION:
        readings = frame[["step", column]].dropna() if column in frame else frame[:0]
        # A damaged row may tell any step; that it does is the row's to say.
        readings = readings[readings["step"] > 0]
        if not readings.empty:
            value, read = float(readings[column].mean()), len(readings)
            more = {"n": read, "window": steps_of(readings), "note": note}
            found.append(file_value(launch, "gates", column, value, unit, **more))
    return tuple(found)


def _unread(frame: Frame, after: int, steps: int, patience: float) -> str:
    """Why so few readings cannot show a collapse, or an empty string.

    As many are needed as mean one, and none missing: no stretch of steps without a reading may be
    several times as long as usual.
    """
    at, count = [int(step) for step in frame["step"]], steps - after
    if len(at) < max(patience, 2):
        return f"{len(at)} reading(s) of the gates in {count} steps: {patience:g} mean a collapse"
    usual = statistics.median_high(later - one for one, later in pairwise(at))
    for one, later in pairwise([after, *at, steps]):
        if later - one > _GAP * max(usual, 1):
            return f"no reading of the gates between steps {one} and {later}"
    return ""


def _longest_run(flags: Sequence[bool]) -> tuple[int, int]:
    """Where the longest run of true flags begins, and its length; (0, 0) if none is true."""
    runs = (list(run) for flag, run in groupby(enumerate(flags), itemgetter(1)) if flag)
    longest = max(runs, key=len, default=[])
    return (longest[0][0], len(longest)) if longest else (0, 0)
