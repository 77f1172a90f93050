"""Fused AdamW A/B: keep it only if it is stable and not slower."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from nsa.contract import proof_text
from nsa.toggles import meaning
from phases.compare import AbPhase, ArmFault, arm_fault, blamed, dropped, places, source_log
from phases.kit import fixed_rules, spec, specs
from phases.kit.case import Case
from phases.kit.commands import environment
from phases.kit.finding import Finding, ending, incomplete, invalid, passed, warned
from phases.kit.measure import log_value, rank_value
from phases.kit.rows import Row
from phases.training import training_rows
from runbook.config.precedence import SAFE_MODE
from runbook.config.registry import PlanContext
from runbook.records import Measurement, Outcome, Reason
from runbook.records.evidence import Frame
from runbook.stats import FUSED_LAUNCHES_PLAN, FUSED_PLAN, Decided, Decision, FloatArray
from runbook.stats.arms import non_inferiority, t_quantile
from runbook.stats.throughput import measured_rows

_CONFIDENCE = 0.99


class FusedAdamW(AbPhase):
    """Requirements F1 to F4."""

    name = "fused_adamw"
    order = 80
    title = "Fused AdamW A/B"
    source = "requirements F1 to F4"
    question = "Can fused AdamW replace plain AdamW?"
    fixed = fixed_rules("fused_adamw")
    limits = specs("fused_margin", "loss_parity", "flaky_launches")
    toggle = "NSA_OPT_FUSED"
    compared = "optimizer's kernel"
    ratio = "fused_ratio"
    table_title = "Plain and fused AdamW"
    ordered_first = True
    unset_is_control = True

    def values(self, context: PlanContext) -> Mapping[str, str]:
        """The control first; an A/A runs it twice."""
        return {"baseline": "0", "again": "0"} if context.aa else {"baseline": "0", "fused": "1"}

    def excluded(self, context: PlanContext) -> str:
        """The safe mode forbids the fused arm."""
        if context.aa or not meaning(SAFE_MODE, environment(context, self.name)):
            return ""
        return f"{SAFE_MODE}=1 forbids {self.toggle}=1, so this needs a run without it"

    def control(self, context: PlanContext) -> str:
        """The plain optimizer."""
        return next(iter(self.values(context)))

    def variant(self, context: PlanContext) -> str:
        """The arm that is not the control."""
        return list(self.values(context))[1]

    def may_fail(self, context: PlanContext, arm: str) -> bool:
        """A fault of the variant is an answer: DROP."""
        return arm == self.variant(context)

    def rows(self) -> Sequence[Row]:
        """The comparison, in which a fault of the fused arm only drops that arm."""
        return (
            *training_rows(self.names),
            *self.alike_rows(),
            self.row.one("took_effect", self._took_effect),
            self.row.one("loss_parity", self._loss_parity),
            self.row.one("control", self.reproduces),
            self.row.one("keep", self._keep),
        )

    def instead(self, case: Case, row: Row) -> Finding | None:
        """A fault of the fused arm only drops that arm, which row `keep` says."""
        return None if row.what == "keep" else dropped(case, row, self._fault(case))

    def decide(
        self, context: PlanContext, rounds: Frame, steps: FloatArray | None, *, final: bool
    ) -> Decision:
        """Is the variant at most the margin slower: by interim analyses in blocks."""
        table = rounds.pivot(index="block", columns="arm", values="value")
        base, variant = (table[arm].tolist() for arm in self.values(context))
        margin = context.profile.limit(spec("fused_margin")).value
        plan = FUSED_PLAN if context.protocol == "blocks" else FUSED_LAUNCHES_PLAN
        return non_inferiority(base, variant, margin=margin, plan=plan, final=final, steps=steps)

    def _fault(self, case: Case) -> ArmFault | None:
        variant, launches = self.variant(case.context), case.evidence.launches
        if case.context.protocol == "blocks":
            return arm_fault(case, optional_arms=[variant])
        own = [place.launch for place in places(case, [variant]) if place.launch in launches]
        bad = [end for name in own if (end := ending(launches[name])).outcome is Outcome.FAIL]
        return blamed(variant, bad[0]) if bad else None

    def _took_effect(self, case: Case) -> Finding:
        found = list(self.effect_problems(case))
        first = case.launch(self.names(case)[0])
        paths = [rank.path for rank in first.ranks[:1]]
        if found:
            return invalid(Reason.NO_EFFECT, "; ".join(dict.fromkeys(found)), evidence=paths)
        proofs = {
            effect.arm or "launch": proof_text(effect.evidence)
            for effect in first.effects(self.toggle)
        }
        text = "; ".join(f"{arm}: {proof}" for arm, proof in proofs.items())
        return passed(text, measurement=rank_value(first.ranks[0], "optimizer_kernel", text or "-"))

    def _loss_parity(self, case: Case) -> Finding:
        limit = case.limit("loss_parity")
        gap = _loss_gap(case, list(self.values(case.context)))
        text = f"the variant's loss differs by {float(gap.value):+.4f} nats"
        low, high = gap.interval or (float(gap.value), float(gap.value))
        # The smallest difference that the interval allows: zero if it spans zero.
        if not limit.holds(max(low, -high, 0.0)):
            reason = f"{text}, beyond +-{limit.value:g}: DROP"
            return warned(reason, measurement=gap, limit=limit, topic="fused")
        reason = f"{text}, not shown to be beyond +-{limit.value:g}"
        return passed(reason, measurement=gap, limit=limit)

    def choice(self, case: Case) -> str | None:
        """On if speed says KEEP and nothing else speaks against the variant."""

        clean = self._keep(case).code is Reason.OK
        return "1" if clean and self.decision(case).outcome is Decided.KEEP else None

    def _keep(self, case: Case) -> Finding:
        fault = self._fault(case)
        if fault is not None:
            _, end = fault
            reason = f"DROP: {end.reason}"
            return warned(reason, evidence=end.evidence, topic=end.topic or "fused")
        effect = self._took_effect(case)
        if effect.outcome is not Outcome.PASS:
            return effect
        parity = self._loss_parity(case)
        if parity.code is Reason.WARNING:
            return warned(f"DROP: {parity.reason}", measurement=parity.measurement, topic="fused")
        return self.answer(case, self.decision(case))


def _loss_gap(case: Case, arms: Sequence[str]) -> Measurement:
    """Mean loss of the second arm minus that of the first, in nats, with a 99 % interval.

    One value per round and arm: the mean loss of the arm's measured steps in that round.
    """
    first, second = (_losses(case, arm) for arm in arms)
    gaps = [after - before for before, after in zip(first, second, strict=False)]
    if not gaps:
        raise incomplete(Reason.TOO_FEW_SAMPLES, "no round has both arms")
    if not all(map(math.isfinite, (*first, *second))):
        raise incomplete(Reason.NON_FINITE, "the loss is not finite in every step")
    rounds, mean, half = len(gaps), statistics.fmean(gaps), 0.0
    if rounds > 1:
        bar = statistics.stdev(gaps) / math.sqrt(rounds)
        half = t_quantile((1 - _CONFIDENCE) / 2, rounds - 1) * bar
    value = log_value(source_log(case, arms), "loss_gap", mean, "nats", n=rounds)
    return value.model_copy(update={"interval": (mean - half, mean + half)})


def _losses(case: Case, arm: str) -> list[float]:
    means: list[float] = []
    for place in places(case, [arm]):
        rows = measured_rows(case.log(place.launch), arm=place.inside)
        if place.inside is None:
            means.append(float(rows["loss"].mean()))
        else:
            means += rows.groupby("block")["loss"].mean().tolist()
    return means
