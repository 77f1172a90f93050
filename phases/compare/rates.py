"""What a launch did, in numbers and curves.

Its throughput: the floor, the aim, what it is of the device's peak, the days it means, and a table.
Behind them the curves of a report.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from nsa.contract import Ceiling
from phases.kit.case import Case, once, optional
from phases.kit.finding import Finding, invalid, missing, passed, skipped, warned
from phases.kit.measure import (
    against,
    decided,
    derived,
    effective_rate,
    last50,
    rank_value,
    shown_only,
)
from phases.machine.ceilings import other_devices, slowest
from phases.training import require_sound
from phases.training.own import own_rate
from phases.training.plausible import mfu_of
from phases.training.stability import selection
from runbook.accounts import COPY_TOLERANCE
from runbook.accounts.clocks import busy_steps, clock_ratio
from runbook.config import IDLE_MFU, Limit
from runbook.config.registry import Judgement
from runbook.records import Mark, Measurement, Outcome, Reason, Series, Table, Window, thin_points
from runbook.records.evidence import Frame, LaunchEvidence
from runbook.records.measurement import MIB_PER_GIB, TOKENS_PER_SECOND
from runbook.stats.launches import meets_target


def cell(measured: Measurement | None) -> float | None:
    """A number for a table's cell."""
    return None if measured is None else round(float(measured.value), 1)


_SECONDS_PER_DAY = 86_400.0


@once
def launch_rate(case: Case, name: str) -> Measurement:
    """Tokens over time of one launch after warm-up, by the slower of two clocks.

    Column dt_s is the trainer's word; the ranks' own clocks may show that the same steps took
    longer. Where they are more than 2 % apart, row `accounts` fails and the launch counts for
    nothing.
    """
    if case.profile.own_trainer:
        return own_rate(case, name)
    log = case.log(name)
    rate = effective_rate(log)
    first = rate.window.first_step if rate.window else 0
    ranks = case.launch(name).ranks
    busy = busy_steps(ranks)
    clocks = [(clock_ratio(log.frame, rank, busy, first_step=first), rank) for rank in ranks]
    slowest, rank = max(clocks, key=lambda clock: clock[0], default=(1.0, None))
    if rank is None or slowest <= 1.0 + COPY_TOLERANCE:
        return rate
    clock = rank_value(rank, "clock_ratio", slowest)
    slower = float(rate.value) / slowest
    note = f"by the clock of rank {rank.rank}, {slowest - 1:.2%} slower than dt_s"
    return derived(rate, value=slower, note=note, also=[rate, clock])


def _last50s(case: Case, names: Sequence[str]) -> Iterator[Measurement]:
    """The last-50 statistic (W3) of every launch that has one."""
    for name in names:
        with suppress(Finding):
            yield last50(case.log(name))


def launch_rates(case: Case, names: Sequence[str]) -> list[Measurement]:
    """Tokens over time of every launch after warm-up; raises where one has no evidence."""
    return [launch_rate(case, name) for name in names]


def pooled_rate(case: Case, names: Sequence[str]) -> Measurement:
    """Geometric mean of the launches' throughputs, with every launch's file and window."""
    rates = launch_rates(case, names)
    mean = statistics.geometric_mean(float(rate.value) for rate in rates)
    note = f"tokens / time, mean of {len(rates)} launches"
    return derived(rates[0], name="throughput", value=mean, n=len(rates), note=note, also=rates)


def throughput(case: Case, names: Sequence[str]) -> Finding:
    """One-sided 95 % bound over the launches against the profile's floor."""
    require_sound(case, names)
    pooled, limit = pooled_rate(case, names), case.limit("throughput")
    if not limit.gated:
        return shown_only(pooled, limit, f"throughput: {pooled}")
    rates = launch_rates(case, names)
    decision = meets_target([float(rate.value) for rate in rates], limit.value)
    shown = pooled.model_copy(update={"interval": decision.interval})
    last = optional(lambda: last50(case.log(names[0])))
    alone = f"; shown beside it, the last 50 steps of {names[0]}"
    beside = f"{alone}: {last}" if last else "; fewer than 50 measured steps in a launch"
    paths = tuple(rate.path for rate in rates)
    finding = decided(decision, shown, limit, reason=decision.reason + beside, evidence=paths)
    slow = f"Too slow: {float(shown.value):.4g} tok/s, at least {limit.value:g} tok/s is required."
    title = slow if finding.outcome is Outcome.FAIL else ""
    return replace(finding, title=title)


def aim(case: Case, names: Sequence[str]) -> Finding:
    """Where the throughput stands in the band that is aimed at; it never decides."""
    pooled = pooled_rate(case, names)
    low, high = case.limit("throughput_aim_low"), case.limit("throughput_aim_high")
    if not case.profile.throughput_gated:
        return shown_only(pooled, low, f"throughput: {pooled}")
    value = float(pooled.value)
    place = "below" if not low.holds(value) else "inside" if high.holds(value) else "above"
    reason = f"{value:.4g} tok/s is {place} the aim of {low.value:g}-{high.value:g} ({low.source})"
    return skipped(Reason.NOT_GATED, f"{reason}; an aim, not a limit", measurement=pooled)


def stale_target(case: Case, names: Sequence[str]) -> Finding:
    """A floor under half of what is measured can catch nothing: STALE TARGET."""
    pooled, limit = pooled_rate(case, names), case.limit("throughput")
    value = float(pooled.value)
    if not limit.gated:
        reason = f"no floor is gated on profile {case.profile.name}"
        return skipped(Reason.NOT_GATED, reason, measurement=pooled)
    share = limit.value / value
    if share < 0.5:
        reason = (
            f"STALE TARGET: {limit.value:g} tok/s is {share:.1%} of the {value:.4g} measured, so "
            f"a run {1 / share:.0f} times slower would still pass"
        )
        return warned(reason, measurement=pooled)
    return passed(f"the floor is {share:.0%} of what is measured", measurement=pooled)


def mfu(case: Case, names: Sequence[str]) -> Finding:
    """Model FLOPs per second over the devices' peak; INVALID if impossible, or if they idle."""
    pooled, env = pooled_rate(case, names), case.env(names[0])
    peak, floor = case.profile.hardware.peak_tflops, case.limit("mfu_floor")
    if peak is None:
        reason = f"{pooled}; no peak of this device is known, so no share of it"
        return skipped(Reason.NOT_GATED, reason, measurement=pooled)
    share = _share(env, names[0], pooled, peak)
    note = f"{_size(env)}, peak {peak:.0f} TFLOP/s"
    value = derived(pooled, name="mfu", value=share, unit="", note=note)
    told = f"MFU {share:.3%}; {note} ({case.profile.hardware.peak_source})"
    if not IDLE_MFU <= share <= 1.0:
        reason = f"{told}: under {IDLE_MFU:.0%}, where the devices idle, or it is not in (0, 1]"
        return invalid(Reason.NOT_PLAUSIBLE, reason, measurement=value, topic="plausible")
    if floor.gated:
        return against(value, floor, told)
    if floor.holds(share):
        return passed(told, measurement=value)
    return warned(f"{told}, under {floor.value:.1%} ({floor.source})", measurement=value)


def _share(env: Mapping[str, Any], name: str, rate: Measurement, peak_tflops: float) -> float:
    share = mfu_of(env, float(rate.value), peak_tflops)
    if share is None:
        raise missing(f"{name}: env.json has no FLOPs per token")
    return share


def _size(env: Mapping[str, Any]) -> str:
    return f"{float((env.get('effective') or {}).get('n_params') or 0) / 1e6:.1f}M parameters"


def mfu_of_ceiling(case: Case, names: Sequence[str]) -> Finding:
    """Model FLOPs per second over the matrix product that preflight measured on these devices.

    A slow card lowers both, so what is missing here is missing to the settings or to the host.
    """
    pooled, env = pooled_rate(case, names), case.env(names[0])
    limit = case.limit("mfu_of_ceiling")
    if not limit.gated and "preflight" not in case.evidence.earlier:
        reason = f"throughput: {pooled}; preflight, which measures the ceiling, was not run"
        return skipped(Reason.NOT_GATED, reason, measurement=pooled)
    before = case.earlier("preflight")
    if strange := other_devices(before, env):
        return invalid(Reason.NOT_COMPARABLE, strange, measurement=pooled)
    slow = slowest(before, Ceiling.MATMUL)
    share = _share(env, names[0], pooled, float(slow.value))
    text = f"{share:.2%} of {float(slow.value):.4g} TFLOP/s for each device ({slow.note})"
    note = _size(env)
    value = derived(pooled, name="mfu_of_ceiling", value=share, unit="", note=note, also=[slow])
    # Shown only, it may be of shared cores, which were slower while preflight ran.
    if limit.gated and not 0.0 < share <= 1.0:
        reason = f"{text}: a share outside (0, 1] is not possible"
        return invalid(Reason.NOT_PLAUSIBLE, reason, measurement=value, topic="plausible")
    return against(value, limit, text)


def production_days(case: Case, names: Sequence[str]) -> Finding:
    """Days that the production steps take at this pace, and their cost if a price is given."""
    pooled, work = pooled_rate(case, names), case.profile.workload
    per_step = case.profile.tokens_per_step
    tokens = float(per_step * work.production_steps)
    days = tokens / float(pooled.value) / _SECONDS_PER_DAY
    price = case.context.gpu_hour_price
    cost = ""
    if price is not None:
        spent = case.profile.cost(days * _SECONDS_PER_DAY, price)
        cost = f", cost {spent:.0f} at {price:g} per GPU hour"
    value = derived(pooled, name="production_days", value=days, unit="days")
    reason = f"{work.production_steps} steps of {per_step} tokens take {days:.3g} days{cost}"
    return skipped(Reason.NOT_GATED, f"{reason}; shown, not gated", measurement=value)


# Of a table's row: what it is called, its launch, and its arm inside that, if it is one.
Rated = tuple[str, str, str | None]


def rate_table(case: Case, rated: Sequence[Rated], *, title: str, column: str = "launch") -> Table:
    """Each launch or arm by the last-50 statistic (W3) and by tokens over time."""
    rows: list[tuple[str | float | None, ...]] = []
    for label, name, arm in rated:
        log, last = optional(partial(case.log, name, ended=False)), last50_of(case, name, arm)
        own = partial(own_rate, case, name) if case.profile.own_trainer else None
        rate = optional(own or partial(effective_rate, log, arm=arm)) if log else None
        spread = None if last is None or last.stdev is None else round(last.stdev, 1)
        window = str(last.window) if last else f"fewer than 50 {'rows' if own else 'steps'}"
        source = log.path if log else "no evidence"
        rows.append((label, cell(last), spread, window, cell(rate), source))
    columns = (column, "last-50 mean", "last-50 stdev", "window", "tokens / time", "source")
    note = "tok/s of all ranks; a launch is judged by tokens / time, arms by pairs of blocks"
    return Table(title=title, columns=columns, rows=tuple(rows), note=note)


def last50_of(case: Case, name: str, arm: str | None = None) -> Measurement | None:
    """The last-50 statistic of a launch, or of an arm in it; None where it has none."""
    return optional(lambda: last50(case.log(name, ended=False), arm=arm))


def shown(
    case: Case,
    names: Sequence[str],
    *,
    title: str,
    floor: Sequence[Mark] = (),
    curves: Iterable[Series] = (),
    health_of: str = "",
) -> Judgement:
    """Table, last-50 statistics and curves of these launches, and the gates' health of one."""
    launch = optional(lambda: case.launch(health_of)) if health_of else None
    read, gates = (selection(launch), _gate_curves(case, launch)) if launch else ((), ())
    return Judgement(
        tables=(rate_table(case, [(name, name, None) for name in names], title=title),),
        measurements=(*_last50s(case, names), *read),
        series=(*_throughputs(case, names, floor), *curves, *gates),
    )


# -- the curves of a report: what a launch did in every step, and the levels it is held against ----

# A picture is about twice as wide in pixels of a screen.
_POINTS = 200


def _throughputs(case: Case, names: Sequence[str], limits: Sequence[Mark]) -> Iterator[Series]:
    """Throughput of every step of each launch, with its warm-up and its last-50 window."""
    for name in names:
        with suppress(Finding):
            log = case.log(name, ended=False)
            rate, last = optional(partial(effective_rate, log)), optional(partial(last50, log))
            first = int(log.frame["step"].min())
            counted = rate.window.first_step if rate and rate.window else first
            yield from _curve(
                log.frame,
                "toks_per_s",
                (log.path, log.sha256),
                name=f"{name} toks_per_s",
                label=name,
                unit=TOKENS_PER_SECOND,
                group="throughput",
                limits=tuple(limits),
                warmup=Window(first_step=first, last_step=counted - 1) if counted > first else None,
                window=last.window if last else None,
            )


def losses(
    case: Case, name: str, levels: Callable[[float, float], Sequence[Mark]] | None = None
) -> Iterator[Series]:
    """The loss of a launch against its floor; `levels` makes others of ln(V) and the floor."""
    with suppress(Finding):
        log, effective = case.log(name, ended=False), case.env(name).get("effective") or {}
        # What a model that knows nothing reaches, and the least that the data allow (nats).
        size, floor = effective.get("vocab_size") or 0, effective.get("loss_floor", math.nan)
        start = math.log(size) if size > 1 else math.nan
        known = {"ln(V), knows nothing": start, "entropy rate, the floor": floor}
        if abs(start - floor) < 1e-6:
            known = {"ln(V), the floor of noise": start}
        told = [Mark(label=label, value=v) for label, v in known.items() if math.isfinite(v)]
        limits = (*(levels(start, floor) if levels else ()), *told)
        yield from _curve(
            log.frame, "loss", (log.path, log.sha256), name=f"{name} loss", label=name,
            unit="nats", group="loss", limits=limits,
        )  # fmt: skip


def memories(
    case: Case, name: str, column: str, *, group: str, limits: Sequence[Mark] = ()
) -> Iterator[Series]:
    """Memory (GiB) of every rank after each step that told it: `mem_mib` or `reserved_mib`."""
    launch = optional(lambda: case.launch(name))
    for rank in launch.ranks if launch else ():
        if rank.steps is not None and column in rank.steps:
            gib = rank.steps.assign(gib=rank.steps[column] / MIB_PER_GIB)
            said = f"{name} rank {rank.rank} {column}"
            yield from _curve(
                gib,
                "gib",
                (rank.path, rank.sha256),
                name=said,
                label=f"rank {rank.rank}",
                unit="GiB",
                group=group,
                limits=tuple(limits),
            )


def _gate_curves(case: Case, launch: LaunchEvidence) -> Iterator[Series]:
    """Entropy of the gates and the largest share of a branch, against their limits."""
    for column, label, limit, words in (
        ("entropy", "entropy over ln 3", "gate_entropy_min", "entropy at least"),
        ("max_gate", "largest share of a branch", "gate_max_share", "largest share at most"),
    ):
        if launch.gates is not None:
            yield from _curve(
                launch.gates, column, launch.files["gates"],
                name=f"{launch.launch.name} gate {column}",
                label=label, unit="share", group="gates",
                limits=(Mark(label=words, value=case.limit(limit).value),),
            )  # fmt: skip


def marks(limit: Limit, words: str) -> list[Mark]:
    """The limit as a labelled level, where it decides."""
    return [Mark(label=words, value=limit.value)] if limit.gated else []


def _curve(frame: Frame, column: str, file: tuple[str, str], **said: object) -> Iterator[Series]:
    """A column over the steps, if it holds anything; `file` is the table's path and digest."""
    rows = frame[frame[column].notna()] if column in frame else frame[:0]
    if not rows.empty:
        heights = [float(f"{value:.6g}") for value in rows[column].tolist()]
        points = thin_points(rows["step"].tolist(), heights, keep=_POINTS)
        fields = {"points": points, "n": len(rows), "path": file[0], "sha256": file[1]}
        yield Series.model_validate({**fields, **said})
