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

    def rows(self) -> Sequence[Row]:
        """The runbook's baseline judgements."""
        return (
            *training_rows(self.names),
            Row("comparable", "Did all launches run the same configuration?", self.over(alike)),
            toggles_row(self.names, but=("NSA_DDP_COMPRESS",)),
            Row(
                "compression",
                "Is gradient compression active?",
                self.over(compression_active),
                topic="compression",
            ),
            Row(
                "throughput",
                "Does the throughput reach the floor?",
                self.over(throughput),
                topic="throughput",
            ),
            Row("throughput_aim", "Is the throughput in the target band?", self.over(aim)),
            Row(
                "target_fresh",
                "Can the floor catch anything?",
                self.over(stale_target),
                topic="target",
            ),
            Row(
                "mfu", "What share of the device's peak is used?", self.over(mfu), topic="plausible"
            ),
            Row(
                "gpu_utilisation", "Are the GPUs busy?", self.over(utilisation), topic="throughput"
            ),
            Row("gpu_balance", "Are the GPUs equally busy?", self.over(balance), topic="balance"),
            Row(
                "memory_headroom", "Is enough GPU memory left?", self.over(headroom), topic="memory"
            ),
            Row(
                "production_time",
                "How long will the production run take, and what will it cost?",
                self.over(production_days),
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
