"""DDP bucket sweep: which bucket size, if it matters at all."""

from __future__ import annotations

from collections.abc import Sequence

from phases.common.ab import (
    INTERLEAVED,
    arm_table,
    launch_name,
    places,
    reproduces_baseline,
    samples,
)
from phases.common.case import Case
from phases.common.commands import environment, scaled, schedule, trainer_launch
from phases.common.effects import effect_problem
from phases.common.finding import Finding, failed, invalid, passed
from phases.common.measure import decided, derived, effective_rate, rank_value
from phases.common.plausible import alike
from phases.common.rates import optional
from phases.common.rows import Row, RowPhase
from phases.common.training import require_sound, toggles_row, training_rows
from phases.limits import SWEEP
from runbook.records import Launch, Measurement, Reason
from runbook.records.evidence import TrainingLog
from runbook.records.phase import Judgement, PlanContext

_TOGGLE = "NSA_DDP_BUCKET_MB"


class BucketSweep(RowPhase):
    """Seed 000, "DDP Bucket Sweep"."""

    name = "bucket_sweep"
    order = 30
    title = "DDP bucket sweep"
    source = "seed 000, DDP Bucket Sweep"
    question = "Which bucket size is best, and by more than chance?"
    fixed = SWEEP
    reads = ("baseline",)
    arms_toggle = "NSA_DDP_BUCKET_MB"

    def arms(self, context: PlanContext) -> dict[str, dict[str, str]]:
        """Arms by name; an A/A runs the first size twice."""
        sizes = context.profile.phases[self.name].arms
        if context.aa:
            return {"a": {_TOGGLE: sizes[0]}, "again": {_TOGGLE: sizes[0]}}
        return {size: {_TOGGLE: size} for size in sizes}

    def plan(self, context: PlanContext) -> list[Launch]:
        """Randomised blocks in one launch; `--protocol launches`: one launch per arm and round."""
        settings = context.profile.phases[self.name]
        if context.protocol == "blocks":
            env = environment(context, self.name, without=(_TOGGLE,))
            plan = schedule(context, self.name, self.arms(context))
            return [
                trainer_launch(
                    context,
                    phase=self.name,
                    name=INTERLEAVED,
                    steps=plan.total_steps,
                    env=env,
                    schedule=plan,
                    purpose="bucket sizes take turns in random order",
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
                purpose=f"bucket {values[_TOGGLE]} MB, round {number}",
            )
            for number in range(1, rounds + 1)
            for arm, values in self.arms(context).items()
        ]

    def names(self, case: Case) -> Sequence[str]:
        """Names of the launches."""
        return [launch.name for launch in self.plan(case.context)]

    def rows(self, context: PlanContext) -> Sequence[Row]:
        """Did the sizes differ, is the control the baseline, which is best."""
        del context
        names = self.names
        return (
            *training_rows(names),
            Row(
                what="arms_complete",
                question="Did every arm run?",
                answer=self._arms_complete,
                topic="stall",
            ),
            Row(
                what="comparable",
                question="Do the arms differ in the bucket size only?",
                answer=lambda case: alike(case, names(case), but=(f"toggles.{_TOGGLE}",)),
            ),
            toggles_row(names, but=(_TOGGLE,)),
            Row(
                what="buckets_differ",
                question="Did DDP's buckets really differ between the arms?",
                answer=self._buckets_differ,
                topic="bucket",
            ),
            Row(
                what="control",
                question="Does the configured size reproduce the baseline phase?",
                answer=self._control,
            ),
            Row(what="best", question="Which bucket size is best?", answer=self._best),
        )

    def configured(self, context: PlanContext) -> str:
        """The arm of the value in force without a sweep, else the first."""
        arms = self.arms(context)
        value = environment(context, "baseline").get(_TOGGLE, "")
        same = [arm for arm, values in arms.items() if _equal(values[_TOGGLE], value)]
        return same[0] if same else next(iter(arms))

    def enough(self, log: TrainingLog, launch: Launch, context: PlanContext) -> bool:
        """Stop when the sequential plan has decided."""
        from runbook.stats import best_arm_sequential, block_throughputs, complete_rounds

        if launch.schedule is None or not len(log.frame):
            return False
        whole, _ = complete_rounds(block_throughputs(log))
        if whole.empty or whole["arm"].nunique() < len(self.arms(context)):
            return False
        return not best_arm_sequential(whole).go_on

    def _arms_complete(self, case: Case) -> Finding:
        arms = list(self.arms(case.context))
        for name in self.names(case):
            for rank in case.launch(name).ranks:
                if rank.arm_failures:
                    failure = rank.arm_failures[0]
                    reason = f"arm {failure.get('arm')} failed: {failure.get('error')}"
                    return failed(Reason.CRASH, reason, evidence=(rank.path,))
        frame = samples(case, arms)
        rounds = int(frame["block"].nunique())
        source = _measured(case, arms)
        value = derived(source, name="rounds", value=float(rounds), unit="rounds", n=len(frame))
        return passed(f"{len(arms)} arms in {rounds} complete round(s)", measurement=value)

    def _buckets_differ(self, case: Case) -> Finding:
        arms, sizes, problems = self.arms(case.context), {}, []
        for place in places(case, list(arms)):
            launch = case.completed(place.launch)
            value = arms[place.arm][_TOGGLE]
            problems.append(effect_problem(launch, _TOGGLE, value, arm=place.inside))
            found = [
                tuple(event.get("sizes_mib") or ())
                for rank in launch.ranks
                for event in rank.ddp_buckets
                if place.inside is None or event.get("arm") == place.inside
            ]
            sizes[place.arm] = found[-1] if found else ()
        problems += self._size_problems(case, sizes)
        found_problems = list(dict.fromkeys(problem for problem in problems if problem))
        paths = [rank.path for name in self.names(case) for rank in case.launch(name).ranks[:1]]
        if found_problems:
            return invalid(Reason.NO_EFFECT, "; ".join(found_problems), evidence=paths)
        counts = ", ".join(f"{arm}: {len(size)} buckets" for arm, size in sizes.items())
        first = case.launch(self.names(case)[0]).ranks[0]
        return passed(
            counts, measurement=rank_value(first, "bucket_counts", counts), evidence=paths
        )

    def _size_problems(self, case: Case, sizes: dict[str, tuple[float, ...]]) -> list[str]:
        problems = [f"arm {arm}: no bucket sizes logged" for arm, size in sizes.items() if not size]
        problems += [
            f"arm {arm}: one bucket of {size[0]:.2f} MiB, so the size changed nothing"
            for arm, size in sizes.items()
            if len(size) == 1
        ]
        if not case.context.aa and len(set(sizes.values())) < len(sizes):
            problems.append("two arms had the same buckets")
        return problems

    def _control(self, case: Case) -> Finding:
        control = self.configured(case.context)
        place = next(p for p in places(case, list(self.arms(case.context))) if p.arm == control)
        ignored = (f"toggles.{_TOGGLE}",) if place.inside else ()
        return reproduces_baseline(case, launch=place.launch, arm=place.inside, but=ignored)

    def _best(self, case: Case) -> Finding:
        from runbook.stats import Decided, best_arm, best_arm_sequential

        effect = self._buckets_differ(case)
        if effect.code is Reason.NO_EFFECT:
            return invalid(
                Reason.NO_EFFECT, f"no arm is comparable: {effect.reason}", evidence=effect.evidence
            )
        arms = list(self.arms(case.context))
        require_sound(case, self.names(case), but=(f"toggles.{_TOGGLE}",))
        frame = samples(case, arms)
        blocks = case.context.protocol == "blocks"
        decision = best_arm_sequential(frame, final=True) if blocks else best_arm(frame)
        source = _measured(case, arms)
        keeps = decision.winner or self.configured(case.context)
        value = derived(
            source,
            name="best_bucket_ratio",
            value=decision.estimate if decision.estimate is not None else float("nan"),
            unit="ratio",
            n=max(decision.n, 1),
            interval=decision.interval,
        )
        text = f"{decision.outcome.value}: {decision.reason}"
        if decision.outcome is Decided.TIE:
            text += f"; the configured {keeps} MB stays"
        if case.context.aa and decision.outcome is Decided.WINNER:
            reason = f"an A/A run found a winner among equal arms: {decision.reason}"
            return invalid(Reason.NOT_PLAUSIBLE, reason, measurement=value)
        finding = decided(decision, value)
        return Finding(**{**vars(finding), "reason": text})

    def details(self, case: Case) -> Judgement:
        """The bucket table, and the size for later phases."""
        arms = list(self.arms(case.context))
        table, seeds = arm_table(
            case,
            arms,
            title="Bucket size and throughput",
            column=f"{_TOGGLE}",
            note="tok/s; last-50 is the seeds' statistic, the decision rests on tokens / time "
            "of randomised blocks",
        )
        choice = optional(lambda: self._choice(case))
        notes = [f"by the seeds' rule alone (highest mean, tie: lower stdev): {_seed_rule(seeds)}"]
        return Judgement(
            checks=(),
            tables=(table,),
            measurements=tuple(seeds.values()),
            choices={_TOGGLE: choice} if choice else {},
            notes=notes if seeds else [],
        )

    def _choice(self, case: Case) -> str | None:
        from runbook.stats import best_arm, best_arm_sequential

        if case.context.aa or self._buckets_differ(case).code is not Reason.OK:
            return None
        require_sound(case, self.names(case), but=(f"toggles.{_TOGGLE}",))
        arms = self.arms(case.context)
        frame = samples(case, list(arms))
        blocks = case.context.protocol == "blocks"
        decision = best_arm_sequential(frame, final=True) if blocks else best_arm(frame)
        return arms[decision.winner or self.configured(case.context)][_TOGGLE]


def _measured(case: Case, arms: Sequence[str]) -> Measurement:
    place = next(places(case, arms))
    return effective_rate(case.log(place.launch))


def _seed_rule(seeds: dict[str, Measurement]) -> str:
    """What the seeds would choose: the highest mean, among equal means the lower stdev."""
    if not seeds:
        return "nothing"
    return max(seeds, key=lambda arm: (float(seeds[arm].value), -(seeds[arm].stdev or 0.0)))


def _equal(left: str, right: str) -> bool:
    try:
        return float(left) == float(right)
    except ValueError:
        return False
