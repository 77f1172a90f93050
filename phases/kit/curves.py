"""The curves of a report: what a launch did in every step, and the levels it is held against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from phases.kit.case import Case, gather, optional
from phases.kit.measure import effective_rate, last50
from runbook.config import Limit
from runbook.records import Mark, Series, Window, thin_points
from runbook.records.measurement import MIB_PER_GIB, TOKENS_PER_SECOND

if TYPE_CHECKING:
    import pandas as pd

# A picture is about twice as wide in pixels of a screen.
_POINTS = 200


def throughputs(case: Case, names: Sequence[str], limits: Sequence[Mark] = ()) -> list[Series]:
    """Throughput of every step of each launch, with its warm-up and its last-50 window."""

    def one(name: str) -> Series | None:
        log = case.log(name, ended=False)
        rate, last = optional(partial(effective_rate, log)), optional(partial(last50, log))
        first = int(log.frame["step"].min())
        counted = rate.window.first_step if rate and rate.window else first
        return _curve(
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

    return list(gather(optional(partial(one, name)) for name in names))


def losses(
    case: Case, name: str, levels: Callable[[float, float], Sequence[Mark]] | None = None
) -> list[Series]:
    """The loss of a launch against its floor; `levels` makes others of ln(V) and the floor."""

    def one() -> Series | None:
        log, effective = case.log(name, ended=False), case.env(name).get("effective") or {}
        # What a model that knows nothing reaches, and the least that the data allow (nats).
        size, floor = effective.get("vocab_size") or 0, effective.get("loss_floor", math.nan)
        start = math.log(size) if size > 1 else math.nan
        known = {"ln(V), knows nothing": start, "entropy rate, the floor": floor}
        if abs(start - floor) < 1e-6:
            known = {"ln(V), the floor of noise": start}
        told = [Mark(label=label, value=v) for label, v in known.items() if math.isfinite(v)]
        limits = (*(levels(start, floor) if levels else ()), *told)
        return _curve(
            log.frame, "loss", (log.path, log.sha256), name=f"{name} loss", label=name,
            unit="nats", group="loss", limits=limits,
        )  # fmt: skip

    return list(gather([optional(one)]))


def memories(
    case: Case, name: str, column: str, *, group: str, limits: Sequence[Mark] = ()
) -> list[Series]:
    """Memory (GiB) of every rank after each step that told it: `mem_mib` or `reserved_mib`."""
    return list(
        gather(
            _curve(
                rank.steps.assign(gib=rank.steps[column] / MIB_PER_GIB),
                "gib",
                (rank.path, rank.sha256),
                name=f"{name} rank {rank.rank} {column}",
                label=f"rank {rank.rank}",
                unit="GiB",
                group=group,
                limits=tuple(limits),
            )
            for rank in case.launch(name).ranks
            if rank.steps is not None and column in rank.steps
        )
    )


def gate_curves(case: Case, name: str) -> list[Series]:
    """Entropy of the gates and the largest share of a branch, against their limits."""
    launch = case.launch(name)
    shown = (
        ("entropy", "entropy over ln 3", "gate_entropy_min", "entropy at least"),
        ("max_gate", "largest share of a branch", "gate_max_share", "largest share at most"),
    )
    return list(
        gather(
            _curve(
                launch.gates, column, launch.files["gates"], name=f"{name} gate {column}",
                label=label, unit="share", group="gates",
                limits=(Mark(label=words, value=case.limit(limit).value),),
            )
            for column, label, limit, words in shown
            if launch.gates is not None and column in launch.gates
        )
    )  # fmt: skip


def marks(limit: Limit, words: str) -> list[Mark]:
    """The limit as a labelled level, where it decides."""
    return [Mark(label=words, value=limit.value)] if limit.gated else []


def _curve(
    frame: pd.DataFrame, column: str, file: tuple[str, str], **said: object
) -> Series | None:
    """A column over the steps, if it holds anything; `file` is the table's path and digest."""
    rows = frame[frame[column].notna()] if column in frame else frame[:0]
    if rows.empty:
        return None
    heights = [float(f"{value:.6g}") for value in rows[column].tolist()]
    points = thin_points(rows["step"].tolist(), heights, keep=_POINTS)
    fields = {"points": points, "n": len(rows), "path": file[0], "sha256": file[1]}
    return Series.model_validate({**fields, **said})
