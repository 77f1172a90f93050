"""Fused AdamW A/B: keep it only if it is stable and not slower."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phases.common.ab import (
    INTERLEAVED,
    ArmFault,
    arm_fault,
    arm_table,
    launch_name,
    places,
    samples,
    tolerant,
)
from phases.common.case import Case, ending
from phases.common.commands import environment, scaled, schedule, trainer_launch
from phases.common.curves import loss_gap
from phases.common.effects import effect_problem, proof_text
from phases.common.finding import Finding, invalid, passed, warned
from phases.common.measure import decided, derived, effective_rate, rank_value, with_limit
from phases.common.plausible import alike
from phases.common.rates import optional
from phases.common.rows import Row, RowPhase
from phases.common.training import require_sound, toggles_row, training_rows
from runbook.records import Launch, Outcome, Reason
from runbook.records.evidence import TrainingLog
from runbook.records.phase import Judgement, PlanContext

if TYPE_CHECKING:
    import pandas as pd

    from runbook.stats import Decision


_TOGGLE = "NSA_OPT_FUSED"


class FusedAdamW(RowPhase):
    """Seed 000, "Fused AdamW A/B (Optional)"."""

    name = "fused_adamw"
    order = 80
    title = "Fused AdamW A/B"
    source = "seed 000, Fused AdamW A/B (Optional)"
    question = "May fused AdamW replace the plain one?"
    reads = ("baseline",)
    limits = ("fused_margin", "loss_parity")

    def arms(self, context: PlanContext) -> dict[str, dict[str, str]]:
        """The control first; an A/A runs it twice."""
        if context.aa:
            return {"baseline": {_TOGGLE: "0"}, "again": {_TOGGLE: "0"}}
        return {"baseline": {_TOGGLE: "0"}, "fused": {_TOGGLE: "1"}}

    def variant(self, context: PlanContext) -> str:
        """The arm that is not the control."""
        return list(self.arms(context))[1]

    def plan(self, context: PlanContext) -> list[Launch]:
        """Randomised blocks in one launch; `--protocol launches`: one launch per arm and round."""
        settings = context.profile.phases[self.name]
        if context.protocol == "blocks":
            plan = schedule(context, self.name, self.arms(context), ordered_first=True)
            return [
                trainer_launch(
                    context,
                    phase=self.name,
                    name=INTERLEAVED,
                    steps=plan.total_steps,
                    env=environment(context, self.name, without=(_TOGGLE,)),
                    schedule=plan,
                    purpose="plain and fused AdamW take turns in random order",
                )
            ]
        rounds = 1 if context.protocol == "seed" else settings.launches
        steps = scaled(settings.seed_steps or settings.steps, context)
        return [
            trainer_launch(
                context,
                phase=self.name,
                name=launch_name(arm, number),
                steps=steps,
                env={**environment(context, self.name), **values},
                optional=arm == self.variant(context),
                purpose=f"{arm}, round {number}",
            )
            for number in range(1, rounds + 1)
            for arm, values in self.arms(context).items()
        ]

    def names(self, case: Case) -> Sequence[str]:
        """Names of the launches."""
        return [launch.name for launch in self.plan(case.context)]

    def rows(self, context: PlanContext) -> Sequence[Row]:
        """The comparison, in which a fault of the fused arm only drops that arm."""
        del context
        names = self.names
        shared = (
            *training_rows(names),
            Row(
                what="comparable",
                question="Do the arms differ in the optimizer's kernel only?",
                answer=lambda case: alike(case, names(case), but=(f"toggles.{_TOGGLE}",)),
            ),
            toggles_row(names, but=(_TOGGLE,)),
            Row(
                what="took_effect",
                question="Was the optimizer really fused in one arm and not in the other?",
                answer=self._took_effect,
            ),
            Row(
                what="loss_parity",
                question="Do both arms learn alike?",
                answer=self._loss_parity,
                topic="fused",
            ),
            Row(
                what="control",
                question="Does the plain arm reproduce the baseline phase?",
                answer=self._control,
            ),
        )
        keep = Row(
            what="keep",
            question="Is fused AdamW stable and not slower?",
            answer=self._keep,
            topic="fused",
        )
        return (*tolerant(shared, self._fault), keep)

    def enough(self, log: TrainingLog, launch: Launch, context: PlanContext) -> bool:
        """Stop when the sequential plan has decided."""
        from runbook.stats import block_throughputs, complete_rounds

        if launch.schedule is None or not len(log.frame):
            return False
        whole, _ = complete_rounds(block_throughputs(log))
        if whole.empty or whole["arm"].nunique() < 2:
            return False
        table = whole.pivot(index="block", columns="arm", values="value")
        return not self._decide(context, table, final=False).go_on

    def _fault(self, case: Case) -> ArmFault | None:
        variant = self.variant(case.context)
        for place in places(case, [variant]):
            if place.launch not in case.evidence.launches:
                continue
            launch = case.evidence.launches[place.launch]
            if place.inside is None and not launch.result.ok:
                end = ending(launch)
                if end.outcome is Outcome.FAIL:
                    return ArmFault(
                        arm=variant, code=end.code, reason=end.reason, evidence=end.evidence
                    )
            elif place.inside is not None:
                return arm_fault(case, place.launch, optional_arms=[variant])
        return None

    def _took_effect(self, case: Case) -> Finding:
        arms = self.arms(case.context)
        problems = [
            effect_problem(
                case.completed(place.launch), _TOGGLE, arms[place.arm][_TOGGLE], arm=place.inside
            )
            for place in places(case, list(arms))
        ]
        found = [problem for problem in problems if problem]
        first = case.launch(self.names(case)[0])
        paths = [rank.path for rank in first.ranks[:1]]
        if found:
            return invalid(Reason.NO_EFFECT, "; ".join(dict.fromkeys(found)), evidence=paths)
        proofs = {
            effect.arm or "launch": proof_text(effect.evidence) for effect in first.effects(_TOGGLE)
        }
        text = "; ".join(f"{arm}: {proof}" for arm, proof in proofs.items())
        return passed(text, measurement=rank_value(first.ranks[0], "optimizer_kernel", text or "-"))

    def _loss_parity(self, case: Case) -> Finding:
        limit = case.limit("loss_parity")
        gap = loss_gap(case, list(self.arms(case.context)))
        text = f"the variant's loss differs by {float(gap.value):+.4f} nats"
        low, high = gap.interval or (float(gap.value), float(gap.value))
        if low > limit.value or high < -limit.value:
            finding = warned(f"{text}, beyond +-{limit.value:g}: DROP", topic="fused")
        else:
            finding = passed(f"{text}, not shown to be beyond +-{limit.value:g}")
        return with_limit(finding, gap, limit)

    def _control(self, case: Case) -> Finding:
        from phases.common.ab import reproduces_baseline

        place = next(places(case, ["baseline"]))
        return reproduces_baseline(
            case, launch=place.launch, arm=place.inside, but=(f"toggles.{_TOGGLE}",)
        )

    def _decide(self, context: PlanContext, table: pd.DataFrame, *, final: bool = True) -> Decision:
        from runbook.stats import FUSED_PLAN, non_inferiority

        margin = context.profile.limit("fused_margin").value
        base, variant = list(self.arms(context))
        plan = FUSED_PLAN if context.protocol == "blocks" else None
        return non_inferiority(
            table[base].tolist(), table[variant].tolist(), margin, plan=plan, final=final
        )

    def _keep(self, case: Case) -> Finding:
        fault = self._fault(case)
        if fault is not None:
            reason = f"DROP: {fault.reason}"
            return warned(reason, evidence=fault.evidence, topic="fused")
        effect = self._took_effect(case)
        if effect.outcome is not Outcome.PASS:
            return effect
        parity = self._loss_parity(case)
        if parity.code is Reason.WARNING:
            return warned(f"DROP: {parity.reason}", measurement=parity.measurement, topic="fused")
        arms = list(self.arms(case.context))
        require_sound(case, self.names(case), but=(f"toggles.{_TOGGLE}",))
        frame = samples(case, arms)
        decision = self._decide(
            case.context, frame.pivot(index="block", columns="arm", values="value")
        )
        source = effective_rate(case.log(next(places(case, arms)).launch))
        value = derived(
            source,
            name="fused_ratio",
            value=decision.estimate if decision.estimate is not None else math.nan,
            unit="ratio",
            n=max(decision.n, 1),
            interval=decision.interval,
        )
        if case.context.aa and decision.outcome.value == "DROP":
            reason = f"an A/A run found a difference between equal arms: {decision.reason}"
            return invalid(Reason.NOT_PLAUSIBLE, reason, measurement=value)
        if not case.profile.throughput_gated and decision.outcome.as_check != "PASS":
            reason = f"stable, took effect, learns alike; speed: {decision.reason}"
            where = f"not gated on profile {case.profile.name}"
            return passed(f"{reason} ({where}): leave {_TOGGLE} unset", measurement=value)
        finding = decided(decision, value)
        return Finding(
            **{**vars(finding), "reason": f"{decision.outcome.value}: {decision.reason}"}
        )

    def details(self, case: Case) -> Judgement:
        """The A/B table, and the toggle for later phases if it is kept."""
        arms = list(self.arms(case.context))
        table, seeds = arm_table(
            case,
            arms,
            title="Plain and fused AdamW",
            column="arm",
            note="toks/s; last-50 is the seeds' statistic, the decision rests on tokens / time "
            "of randomised blocks",
        )
        kept = optional(lambda: self._keep(case))
        keep = kept is not None and kept.outcome is Outcome.PASS and kept.reason.startswith("KEEP")
        choices = {_TOGGLE: "1"} if keep and not case.context.aa else {}
        return Judgement(
            checks=(), tables=(table,), measurements=tuple(seeds.values()), choices=choices
        )
