"""Measurements from evidence; none without its file and digest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from phases.kit.finding import Finding, failed, inconclusive, invalid, passed, skipped
from runbook.config import Limit
from runbook.records import Measurement, Outcome, Reason, Window
from runbook.records.evidence import Frame, LaunchEvidence, RankLog, TrainingLog
from runbook.stats import Decision
from runbook.stats.throughput import StatisticsError, effective, last_window


def in_file(
    path: str, sha256: str, name: str, value: float | str | bool, unit: str = "", **more: Any
) -> Measurement:
    """A value read from one file of the run; `more` as in `Measurement`."""
    said = {"window": None, **more, "n": max(more.get("n", 1), 1)}
    return Measurement(path=path, sha256=sha256, name=name, value=value, unit=unit, **said)


def file_value(
    launch: LaunchEvidence, kind: str, name: str, value: float | str, unit: str = "", **more: Any
) -> Measurement:
    """A value from one of the files of a launch, such as its `gates`; `more` as in `in_file`."""
    return in_file(*launch.files.get(kind, ("", "")), name, value, unit, **more)


def steps_of(frame: Frame) -> Window:
    """From the first to the last step of a table."""
    first, last = (int(frame["step"].iloc[at]) for at in (0, -1))
    return Window(first_step=first, last_step=last)


def log_value(
    log: TrainingLog,
    name: str,
    value: float,
    unit: str,
    *,
    rows: Sequence[int] | None = None,
    n: int | None = None,
) -> Measurement:
    """A value from the steps of a log; `rows` are first and last position, all by default."""
    first, last = rows if rows else (0, len(log.frame) - 1)
    window = steps_of(log.frame.iloc[first : last + 1])
    count = n if n is not None else last - first + 1
    return in_file(log.path, log.sha256, name, value, unit, n=count, window=window)


def rank_value(rank: RankLog, name: str, value: float | str, unit: str = "") -> Measurement:
    """A value from a heartbeat file."""
    window = None
    if rank.first_step is not None and rank.last_step is not None:
        window = Window(first_step=rank.first_step, last_step=rank.last_step)
    return in_file(rank.path, rank.sha256, name, value, unit, n=rank.events, window=window)


def derived(base: Measurement, *, also: Sequence[Measurement] = (), **said: Any) -> Measurement:
    """A value computed from a measurement, and from those in `also`, with all their files.

    Name, value, unit and n are those of `base` unless they are `said`.
    """
    files = {source.path: source for one in also for source in one.sources}
    others = tuple(source for path, source in files.items() if path != base.path) or base.others
    own = {"interval": None, "note": "", "stdev": None, **said, "others": others}
    return base.model_copy(update=own)


def estimated(base: Measurement, decision: Decision, **said: Any) -> Measurement:
    """A decision's estimate with its interval, from the file of `base`; `said` as in `derived`."""
    value = decision.estimate if decision.estimate is not None else math.nan
    n = max(decision.n, 1)
    return derived(base, value=value, n=n, interval=decision.interval, **said)


def last50(log: TrainingLog, *, arm: str | None = None) -> Measurement:
    """The last-50 statistic (W3); a window that is too short is INCONCLUSIVE, never shorter."""

    try:
        return last_window(log, arm=arm)
    except StatisticsError as error:
        raise _too_short(log, error) from error


def effective_rate(log: TrainingLog, *, arm: str | None = None) -> Measurement:
    """Tokens over time after warm-up, the value that decisions rest on."""

    try:
        rate = effective(log, arm=arm)
    except StatisticsError as error:
        raise _too_short(log, error) from error
    if not 0.0 < float(rate.value) < math.inf:
        reason = f"{log.path}: a throughput of {rate.value} tok/s is impossible"
        raise invalid(Reason.NOT_PLAUSIBLE, reason, evidence=(log.path,))
    return rate


def _too_short(log: TrainingLog, error: ValueError) -> Finding:
    return inconclusive(Reason.TOO_FEW_SAMPLES, str(error), evidence=(log.path,))


def against(
    measurement: Measurement,
    limit: Limit,
    text: str,
    *,
    beyond: Callable[..., Finding] | None = None,
) -> Finding:
    """PASS if the measured number is within the limit, FAIL (or what `beyond` makes) if not.

    `text` says what was measured. A limit that the profile only shows decides nothing, whatever
    the number is: SKIPPED.
    """
    if not limit.gated:
        return shown_only(measurement, limit, text)
    if limit.holds(float(measurement.value)):
        return passed(text, measurement=measurement, limit=limit)
    fault = Reason.BELOW_LIMIT if limit.spec.floor else Reason.ABOVE_LIMIT
    return (beyond or partial(failed, fault))(text, measurement=measurement, limit=limit)


def shown_only(measurement: Measurement, limit: Limit, text: str) -> Finding:
    """A number beside a limit that does not decide on this profile."""
    reason = f"{text}; shown beside {limit}, which is not gated on this profile"
    return skipped(Reason.NOT_GATED, reason, measurement=measurement)


# Reasons of a decision's outcomes: WINNER, TIE, KEEP and DROP are answers, so PASS.
_DECIDED = {
    Outcome.PASS: Reason.OK,
    Outcome.FAIL: Reason.BELOW_LIMIT,
    Outcome.INVALID: Reason.NOT_PLAUSIBLE,
    Outcome.INCONCLUSIVE: Reason.UNDECIDED,
}


def decided(
    decision: Decision,
    measurement: Measurement,
    limit: Limit | None = None,
    *,
    reason: str = "",
    evidence: Iterable[str] = (),
) -> Finding:
    """A decision as a finding, in its own words unless `reason` has others."""
    outcome = decision.outcome.as_check
    files = (*evidence, *(source.path for source in measurement.sources))
    return Finding(
        outcome,
        _DECIDED[outcome],
        reason or decision.reason,
        measurement=measurement,
        limit=limit,
        evidence=files,
        choice=decision.outcome.value if decision.outcome.value != outcome.value else "",
    )
