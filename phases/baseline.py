"""Baseline DDP throughput: the number that decides go or no-go."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from phases.common.case import Case
from phases.common.commands import repeated
from phases.common.curves import columns
from phases.common.gpu import balance, headroom, utilisation
from phases.common.plausible import alike
from phases.common.proofs import compression_active
from phases.common.rates import (
    aim,
    gather,
    launch_last50,
    mfu,
    optional,
    production_days,
    rate_table,
    stale_target,
    throughput,
)
from phases.common.rows import Row, RowPhase
from phases.common.training import toggles_row, training_rows
from phases.limits import (
    GPU_IMBALANCE,
    GPU_UTILISATION,
    MEMORY_HEADROOM,
    MFU_FLOOR,
    PLAUSIBLE,
    THROUGHPUT,
    THROUGHPUT_AIM_HIGH,
    THROUGHPUT_AIM_LOW,
)
from runbook.records import Launch
from runbook.records.phase import Judgement, PlanContext


class Baseline(RowPhase):
    """Requirements B1 to B13."""

    name = "baseline"
    order = 20
    title = "Baseline DDP throughput"
    source = "requirements B1 to B13"
    question = "Does the production config reach the throughput that the plan needs?"
    fixed = PLAUSIBLE
    limits = (
        THROUGHPUT,
        THROUGHPUT_AIM_LOW,
        THROUGHPUT_AIM_HIGH,
        MFU_FLOOR,
        GPU_UTILISATION,
        GPU_IMBALANCE,
        MEMORY_HEADROOM,
    )

    def plan(self, context: PlanContext) -> list[Launch]:
        """Three launches of the profile's steps, or one long one (`--protocol single`)."""
        return repeated(context, phase=self.name, purpose="throughput of the production config")

    def rows(self, context: PlanContext) -> Sequence[Row]:
        """The runbook's baseline judgements."""
        del context
        names = self.names
        return (
            *training_rows(names),
            Row(
                what="comparable",
                question="Did all launches run the same configuration?",
                answer=lambda case: alike(case, names(case)),
            ),
            toggles_row(names, but=("NSA_DDP_COMPRESS",)),
            Row(
                what="compression",
                question="Is gradient compression active?",
                answer=lambda case: compression_active(case, names(case)),
                topic="compression",
            ),
            Row(
                what="throughput",
                question="Does the throughput reach the floor?",
                answer=lambda case: throughput(case, names(case)),
                topic="throughput",
            ),
            Row(
                what="throughput_aim",
                question="Is the throughput in the target band?",
                answer=lambda case: aim(case, names(case)),
            ),
            Row(
                what="target_fresh",
                question="Can the floor catch anything?",
                answer=lambda case: stale_target(case, names(case)),
                topic="target",
            ),
            Row(
                what="mfu",
                question="What share of the device's peak is used?",
                answer=lambda case: mfu(case, names(case)),
                topic="plausible",
            ),
            Row(
                what="gpu_utilisation",
                question="Are the GPUs busy?",
                answer=lambda case: utilisation(case, names(case)),
                topic="throughput",
            ),
            Row(
                what="gpu_balance",
                question="Are the GPUs equally busy?",
                answer=lambda case: balance(case, names(case)),
                topic="balance",
            ),
            Row(
                what="memory_headroom",
                question="Is enough GPU memory left?",
                answer=lambda case: headroom(case, names(case)),
                topic="memory",
            ),
            Row(
                what="production_time",
                question="How long will the production run take, and what will it cost?",
                answer=lambda case: production_days(case, names(case)),
            ),
        )

    def details(self, case: Case) -> Judgement:
        """The throughput of every launch, by the last-50 statistic (W3) and by tokens over time."""
        names = self.names(case)
        table = rate_table(case, names, title="Throughput of each launch")
        found = [optional(partial(launch_last50, case, name)) for name in names]
        curves = [curve for name in names for curve in columns(case, name, {"toks_per_s": None})]
        return Judgement(
            checks=(), tables=(table,), measurements=gather(found), series=tuple(curves)
        )
