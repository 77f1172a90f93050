"""Stability long run under the watchdog: no halt, steady, healthy gates, memory at its plateau."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from phases.common.case import Case, Finding, Unanswerable, incomplete, invalid
from phases.common.commands import environment, trainer_launch
from phases.common.compared import drift_compared, projected_compared
from phases.common.curves import gate_curves, losses, marks, memories, throughputs
from phases.common.gates import gates, selection
from phases.common.measure import against, log_value
from phases.common.own import own_learns, own_memory_limit, own_memory_plateau, own_steady
from phases.common.plausible import LOSS_WINDOW
from phases.common.rates import gather, last50s, optional, rate_table
from phases.common.rows import Row, RowPhase
from phases.common.stability import (
    memory_limit,
    memory_plateau,
    no_halt,
    plateau_of,
    steadiness,
    with_memory,
)
from phases.common.training import toggles_row, training_rows
from phases.limits import (
    DRIFT,
    FLAKY_LAUNCHES,
    GATE_COLLAPSE_READINGS,
    GATE_ENTROPY_MIN,
    GATE_MAX_SHARE,
    LEARNED_SHARE,
    MEMORY,
    STABLE,
    STALL_SHARE,
)
from runbook.records import Comparison, Launch, Mark, Outcome, Reason, Series
from runbook.records.measurement import MIB_PER_GIB
from runbook.records.phase import Judgement, PlanContext

_LAUNCH = "run"
_CHOSEN = ("NSA_DDP_BUCKET_MB", "NSA_OPT_FUSED")


class LongRun(RowPhase):
    """Requirements L1 to L8."""

    name = "long_run"
    order = 90
    title = "Stability long run"
    source = "requirements L1 to L8"
    question = "Does it keep going: no halt, steady, healthy, without a leak?"
    fixed = STABLE
    reads = ("bucket_sweep", "fused_adamw")
    limits = (
        DRIFT,
        STALL_SHARE,
        LEARNED_SHARE,
        GATE_ENTROPY_MIN,
        GATE_MAX_SHARE,
        GATE_COLLAPSE_READINGS,
        MEMORY,
        FLAKY_LAUNCHES,
    )

    def plan(self, context: PlanContext) -> list[Launch]:
        """One launch with the bucket and optimizer that the earlier phases chose."""
        chosen = {
            name: context.choices[name]
            for name in _CHOSEN
            if name in context.choices and name not in context.toggles
        }
        said = ", ".join(f"{name}={value}" for name, value in chosen.items())
        return [
            trainer_launch(
                context,
                phase=self.name,
                name=_LAUNCH,
                env=environment(context, self.name, extra=chosen),
                # Noise cannot be learned: only a source with structure shows that a model learns.
                dataset="markov",
                watched=True,
                purpose=f"stability and learning; chosen by earlier phases: {said or 'nothing'}",
            )
        ]

    def rows(self) -> Sequence[Row]:
        """Stability, each aspect by itself."""
        return (
            *training_rows(self.names),
            toggles_row(self.names),
            Row(
                "no_halt",
                "Did the run go without a watchdog halt?",
                partial(no_halt, name=_LAUNCH),
                topic="stall",
            ),
            Row(
                "steady",
                "Is the throughput steady from beginning to end?",
                partial(steadiness, name=_LAUNCH),
                topic="steady",
                own=partial(own_steady, name=_LAUNCH),
            ),
            Row(
                "learns",
                "Does the loss fall towards the entropy rate of the data?",
                _learns,
                topic="learns",
                own=partial(own_learns, name=_LAUNCH),
            ),
            Row("gates", "Are the gates healthy?", partial(gates, name=_LAUNCH), topic="gates"),
            Row(
                "memory_plateau",
                "Has memory stopped growing?",
                partial(memory_plateau, name=_LAUNCH),
                topic="memory",
                own=partial(own_memory_plateau, name=_LAUNCH),
            ),
            Row(
                "memory_limit",
                "Does every rank stay under the memory limit?",
                partial(memory_limit, name=_LAUNCH),
                topic="memory",
                own=partial(own_memory_limit, name=_LAUNCH),
            ),
        )

    def details(self, case: Case) -> Judgement:
        """Throughput table and the curves."""
        known = optional(lambda: case.launch(_LAUNCH))
        return Judgement(
            checks=(),
            tables=(rate_table(case, [_LAUNCH], title="Throughput of the long run"),),
            measurements=(*last50s(case, [_LAUNCH]), *(selection(known) if known else ())),
            series=_curves(case),
            comparisons=_comparisons(case),
        )


def _learns(case: Case) -> Finding:
    """How far the loss came from knowing nothing, ln(V), to the data's entropy rate.

    Held against the limit is the loss of the last window plus four standard errors.
    """
    log, env = case.log(_LAUNCH), case.env(_LAUNCH)
    effective = env.get("effective") or {}
    dataset, floor = effective.get("dataset"), effective.get("loss_floor")
    start = math.log(max(2, int(effective.get("vocab_size") or 0)))
    if dataset != "markov" or not isinstance(floor, int | float) or not 0 < floor < start:
        reason = f"{_LAUNCH} trained on {dataset} with a floor of {floor}: nothing to learn there"
        raise Unanswerable(invalid(Reason.MISMATCH, reason))
    last = log.frame["loss"].iloc[-LOSS_WINDOW:]
    if not all(map(math.isfinite, last)):
        raise Unanswerable(incomplete(Reason.NON_FINITE, "the loss is not finite at the end"))
    loss = float(last.mean()) + 4 * float(last.std(ddof=0)) / math.sqrt(len(last))
    value = log_value(
        log,
        "learned_share",
        (start - loss) / (start - floor),
        "share",
        rows=(len(log.frame) - len(last), len(log.frame) - 1),
    )
    text = f"loss {loss:.3f}, from ln(V) {start:.3f} towards the entropy rate {floor:.3f}"
    found = against(value, case.limit(LEARNED_SHARE), text)
    if found.outcome is not Outcome.FAIL:
        return found
    if case.context.steps_scale < 1:  # cut short on purpose: the limit is for the whole run
        return replace(found, outcome=Outcome.INCONCLUSIVE, code=Reason.TOO_FEW_SAMPLES)
    return replace(found, code=Reason.NOT_LEARNING)


def _curves(case: Case) -> tuple[Series, ...]:
    """Pace, loss, memory and gates of the run, each with what it is held against."""
    share, known = case.limit(LEARNED_SHARE), optional(lambda: case.launch(_LAUNCH)) is not None

    def wanted(start: float, floor: float) -> list[Mark]:
        level = start - share.value * (start - floor)
        shown = share.gated and math.isfinite(level)
        return [Mark(label="has to come below", value=level)] if shown else []

    most = marks(case.limit(MEMORY), "limit of each rank", factor=MIB_PER_GIB)
    # What the allocator held decides the limit; what tensors take, the plateau.
    kinds = {"memory": "reserved_mib", "tensors": "mem_mib"}
    told = kinds if case.profile.has_gpu else {"memory": "mem_mib"}
    held = [
        curve
        for group, column in told.items()
        if known
        for curve in memories(case, _LAUNCH, column, group=group, limits=most)
    ]
    healthy = gate_curves(case, _LAUNCH) if known else ()
    return (*throughputs(case, [_LAUNCH]), *losses(case, _LAUNCH, wanted), *held, *healthy)


def _comparisons(case: Case) -> tuple[Comparison, ...]:
    """The change of the step time, and the memory that every rank would come to."""
    return gather([optional(partial(_drift, case)), optional(partial(_projected, case))])


def _drift(case: Case) -> Comparison | None:
    measured, drift = steadiness(case, _LAUNCH).measurement, case.limit(DRIFT)
    if measured is None:
        return None
    gated = case.gates_throughput(drift, case.limit(STALL_SHARE))
    level = drift.value if gated else None
    return drift_compared(measured, check="long_run.steady", accepted=level)


def _projected(case: Case) -> Comparison | None:
    found = {
        rank.rank: plateau_of(case, rank).measurement for rank in with_memory(case, _LAUNCH).ranks
    }
    known = {rank: measured for rank, measured in found.items() if measured is not None}
    if not known:
        return None
    return projected_compared(
        known,
        check="long_run.memory_plateau",
        steps=case.profile.workload.production_steps,
        limits=marks(case.limit(MEMORY), "limit of each rank", factor=MIB_PER_GIB),
    )
