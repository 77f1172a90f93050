"""What is kept for the pictures of a report: curves, and the values behind decisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from phases.kit.case import Case, gather, optional
from phases.kit.limits import GATE_ENTROPY_MIN, GATE_MAX_SHARE
from phases.kit.measure import derived, effective_rate, estimated, last50
from runbook.config.limits import Limit
from runbook.records import Compared, Comparison, Mark, Measurement, Series, Window, thin_points
from runbook.records.measurement import TOKENS_PER_SECOND
from runbook.stats.decision import Decision

if TYPE_CHECKING:
    import pandas as pd

    from runbook.records.evidence import TrainingLog

# Points of all curves of one picture, of one curve at most, and at least.
_POINTS, _MOST, _LEAST = 400, 200, 60


def throughputs(case: Case, names: Sequence[str], limits: Sequence[Mark] = ()) -> list[Series]:
    """Throughput of every step of each launch, with its warm-up and its last-50 window."""

    def one(name: str) -> Series | None:
        log = case.log(name, whole=False)
        warmup, last = _warmup(log), optional(partial(last50, log))
        window = last.window if last else None
        return _of_log(
            log, f"{name} toks_per_s", TOKENS_PER_SECOND, label=name, group="throughput",
            limits=limits, keep=_keep(len(names)), warmup=warmup, window=window,
        )  # fmt: skip

    return _curves(one, names)


def losses(
    case: Case, name: str, levels: Callable[[float, float], Sequence[Mark]] | None = None
) -> list[Series]:
    """The loss of a launch against its floor; `levels` makes others of ln(V) and the floor."""

    def one(name: str) -> Series | None:
        log, (start, floor) = case.log(name, whole=False), loss_levels(case, name)
        marks = [*(levels(start, floor) if levels else ()), *_loss_marks(start, floor)]
        return _of_log(log, f"{name} loss", "nats", label=name, group="loss", limits=marks)

    return _curves(one, [name])


def loss_levels(case: Case, name: str) -> tuple[float, float]:
    """ln(V), what a model that knows nothing reaches, and the least that the data allow (nats).

    NaN where env.json does not say.
    """
    effective = case.env(name).get("effective") or {}
    size, floor = effective.get("vocab_size"), effective.get("loss_floor")
    start = math.log(size) if isinstance(size, int) and size > 1 else math.nan
    return start, float(floor) if isinstance(floor, int | float) else math.nan


def _loss_marks(start: float, floor: float) -> list[Mark]:
    known = Mark(label="ln(V), knows nothing", value=start)
    least = Mark(label="entropy rate, the floor", value=floor)
    if abs(start - floor) < 1e-6:
        return [Mark(label="ln(V), the floor of noise", value=start)]
    return [mark for mark in (known, least) if math.isfinite(mark.value)]


def memories(
    case: Case, name: str, column: str, *, group: str, limits: Sequence[Mark] = ()
) -> list[Series]:
    """Memory of every rank after each step that told it: `mem_mib` or `reserved_mib`."""
    ranks = case.launch(name).ranks
    kept = []
    for rank in ranks:
        if rank.steps is not None and column in rank.steps:
            kept.append(
                curve(
                    f"{name} rank {rank.rank} {column}", "MiB", rank.steps, column,
                    label=f"rank {rank.rank}", group=group, limits=limits,
                    file=(rank.path, rank.sha256), keep=_keep(len(ranks)),
                )
            )  # fmt: skip
    return list(gather(kept))


def gate_curves(case: Case, name: str) -> list[Series]:
    """Entropy of the gates and the largest share of a branch, against their limits."""
    launch = case.launch(name)
    shown = {"entropy": ("entropy over ln 3", GATE_ENTROPY_MIN, "entropy at least"),
             "max_gate": ("largest share of a branch", GATE_MAX_SHARE, "largest share at most"),
             }  # fmt: skip
    return list(
        gather(
            curve(
                f"{name} gate {column}", "share", launch.gates, column, label=label, group="gates",
                limits=[Mark(label=words, value=case.limit(spec).value)],
                file=launch.files["gates"], keep=_keep(2),
            )
            for column, (label, spec, words) in shown.items()
            if launch.gates is not None and column in launch.gates
        )
    )  # fmt: skip


def marks(limit: Limit, words: str, *, factor: float = 1.0) -> list[Mark]:
    """The limit as a labelled level, where it decides."""
    return [Mark(label=words, value=limit.value * factor)] if limit.gated else []


def curve(
    name: str,
    unit: str,
    frame: pd.DataFrame,
    column: str,
    *,
    label: str,
    group: str,
    file: tuple[str, str],
    limits: Sequence[Mark] = (),
    keep: int = _MOST,
    warmup: Window | None = None,
    window: Window | None = None,
) -> Series | None:
    """A column over the steps, if it holds anything; `file` is the table's path and digest."""
    rows = frame[frame[column].notna()]
    if rows.empty:
        return None
    heights = [float(f"{value:.6g}") for value in rows[column].tolist()]
    return Series(
        name=name,
        unit=unit,
        points=thin_points(rows["step"].tolist(), heights, keep=keep),
        n=len(rows),
        group=group,
        label=label,
        warmup=warmup,
        window=window,
        limits=tuple(limits),
        path=file[0],
        sha256=file[1],
    )


def _of_log(
    log: TrainingLog,
    name: str,
    unit: str,
    *,
    label: str,
    group: str,
    limits: Sequence[Mark],
    keep: int = _MOST,
    warmup: Window | None = None,
    window: Window | None = None,
) -> Series | None:
    column = name.rpartition(" ")[2]
    if column not in log.frame:
        return None
    return curve(
        name, unit, log.frame, column, label=label, group=group, limits=limits, keep=keep,
        warmup=warmup, window=window, file=(log.path, log.sha256),
    )  # fmt: skip


def _warmup(log: TrainingLog) -> Window | None:
    """The steps before those that the throughput rests on; None if there is none."""
    rate = optional(partial(effective_rate, log))
    first = int(log.frame["step"].min())
    if rate is None or rate.window is None or rate.window.first_step <= first:
        return None
    return Window(first_step=first, last_step=rate.window.first_step - 1)


def _keep(curves: int) -> int:
    """How many points each of so many curves of one picture keeps."""
    return max(_LEAST, min(_MOST, _POINTS // max(curves, 1)))


def _curves(one: Callable[[str], Series | None], names: Sequence[str]) -> list[Series]:
    return list(gather(optional(partial(one, name)) for name in names))


# -- the values behind decisions -------------------------------------------------------------------


def compared_arms(
    frame: pd.DataFrame,
    decision: Decision,
    measured: Measurement,
    *,
    arms: tuple[str, str],
    said: Callable[[str], str],
) -> list[Compared]:
    """Ratios of throughput round by round: the deciding pair `arms`, then its leader's others.

    `measured` is the estimate of the deciding pair. Only the rounds that the decision rests on
    count.
    """
    table = frame.pivot(index="block", columns="arm", values="value").iloc[: decision.n]

    def row(above: str, below: str, measurement: Measurement, *, decides: bool) -> Compared:
        return Compared(
            label=f"{said(above)} against {said(below)}",
            values=tuple(float(ratio) for ratio in table[above] / table[below]),
            measurement=measurement,
            decides=decides,
        )

    rows = [row(*arms, measured, decides=True)]
    for other, bounds in _others(decision, arms[1]):
        ratio, low, high = bounds
        against = derived(
            measured,
            name=f"{measured.name}[{other}]",
            value=ratio,
            unit=measured.unit,
            interval=(low, high),
        )
        # The leader has to beat each of them, so each decides; the closest is named first.
        rows.append(row(arms[0], other, against, decides=True))
    return rows


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """E = T_many / (times x T_one), what it decides, and E of every pair of launches."""

    measurement: Measurement
    decision: Decision
    values: tuple[float, ...]

    def row(self, label: str, *, decides: bool) -> Compared:
        """The values behind it."""
        return Compared(
            label=label, values=self.values, measurement=self.measurement, decides=decides
        )


def efficiency(
    name: str,
    one: Sequence[Measurement],
    many: Sequence[Measurement],
    decision: Decision,
    *,
    times: int,
    note: str,
) -> Efficiency:
    """What was decided from pairs of throughputs, with all their files."""
    pairs = zip(one, many, strict=True)
    measured = estimated(many[0], decision, name=name, unit="", note=note, also=[*many, *one])
    values = tuple(float(b.value) / (times * float(a.value)) for a, b in pairs)
    return Efficiency(measurement=measured, decision=decision, values=values)


def efficiencies_compared(
    rows: Sequence[Compared],
    *,
    check: str,
    floor: Sequence[Mark],
    title: str = "Scaling efficiency E, pair by pair",
    each: str = "one pair of launches",
) -> Comparison:
    """Scaling efficiencies against the linear one and the floor that decides, if one does."""
    return Comparison(
        check=check,
        title=title,
        each=each,
        unit="E",
        rows=tuple(rows),
        reference=Mark(label="linear", value=1.0),
        limits=tuple(floor),
    )


def _others(decision: Decision, closest: str) -> list[tuple[str, Sequence[float]]]:
    """Ratio and interval of the leader against each arm but the closest."""
    against = decision.details.get("against")
    if not isinstance(against, dict):
        return []
    return [
        (arm, [float(str(number)) for number in bounds])
        for arm, bounds in against.items()
        if arm != closest and isinstance(bounds, list)
    ]
