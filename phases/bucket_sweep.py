"""DDP bucket sweep: which bucket size, if it matters at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from nsa.toggles import meaning
from phases.compare import AbPhase, places, refused, samples
from phases.kit import fixed_rules, specs
from phases.kit.case import Case
from phases.kit.commands import environment
from phases.kit.finding import Finding, invalid, passed
from phases.kit.measure import derived, rank_value
from phases.kit.rows import Row
from phases.training import training_rows
from runbook.config.registry import PlanContext
from runbook.records import Measurement, Reason
from runbook.records.evidence import Frame
from runbook.stats import BUCKET_LAUNCHES_PLAN, BUCKET_PLAN, Decided, Decision, FloatArray
from runbook.stats.arms import best_arm_sequential, rounds_of


class BucketSweep(AbPhase):
    """Requirements W1 to W6."""

    name = "bucket_sweep"
    order = 30
    title = "DDP bucket sweep"
    source = "requirements W1 to W6"
    question = "Which bucket size is best, and by more than chance?"
    fixed = fixed_rules("bucket_sweep")
    limits = specs("flaky_launches")
    toggle = "NSA_DDP_BUCKET_MB"
    compared = "bucket size"
    ratio = "best_bucket_ratio"
    table_title = "Bucket size and throughput"
    table_column = toggle
    arms_toggle = toggle

    def values(self, context: PlanContext) -> Mapping[str, str]:
        """The profile's sizes; an A/A runs the first one twice."""
        sizes = context.profile.phases[self.name].arms
        return {"a": sizes[0], "again": sizes[0]} if context.aa else {size: size for size in sizes}

    def control(self, context: PlanContext) -> str:
        """The arm of the value in force without a sweep, else the first."""
        values = self.values(context)
        given = environment(context, "baseline")
        current = meaning(self.toggle, given) if self.toggle in given else None
        means = {arm: meaning(self.toggle, {self.toggle: value}) for arm, value in values.items()}
        return next((arm for arm, value in means.items() if value == current), next(iter(values)))

    def rows(self) -> Sequence[Row]:
        """Did the sizes differ, is the control the baseline, which is best."""
        return (
            *training_rows(self.names),
            self.row.one("arms_complete", self._arms_complete),
            *self.alike_rows(),
            self.row.one("buckets_differ", self._buckets_differ),
            self.row.one("control", self.reproduces),
            self.row.one("best", self._best),
        )

    def decide(
        self, context: PlanContext, rounds: Frame, steps: FloatArray | None, *, final: bool
    ) -> Decision:
        """The best arm: by interim analyses in blocks, else at the planned end."""
        plan = BUCKET_PLAN if context.protocol == "blocks" else BUCKET_LAUNCHES_PLAN
        return best_arm_sequential(*rounds_of(rounds), plan=plan, final=final, steps=steps)

    def _arms_complete(self, case: Case) -> Finding:
        arms = list(self.values(case.context))
        for name in self.names(case):
            if fault := refused(case.launch(name), arms):
                return replace(fault[1], topic="")
        frame = samples(case, arms)
        rounds = int(frame["block"].nunique())
        value = derived(
            self.measured(case), name="rounds", value=float(rounds), unit="rounds", n=len(frame)
        )
        return passed(f"{len(arms)} arms in {rounds} complete round(s)", measurement=value)

    def _buckets_differ(self, case: Case) -> Finding:
        effects = list(self.effect_problems(case))
        sizes = self._bucket_sizes(case)
        problems = dict.fromkeys((*effects, *_size_problems(sizes, same=case.context.aa)))
        paths = [rank.path for name in self.names(case) for rank in case.launch(name).ranks[:1]]
        if problems:
            # Where the trainer makes others than it was told, the profile's sizes are not to blame.
            topic = "settings" if effects else ""
            reason = "; ".join(problems)
            return invalid(Reason.NO_EFFECT, reason, evidence=paths, topic=topic)
        counts = ", ".join(f"{arm}: {len(size)} buckets" for arm, size in sizes.items())
        first = case.launch(self.names(case)[0]).ranks[0]
        return passed(
            counts, measurement=rank_value(first, "bucket_counts", counts), evidence=paths
        )

    def _bucket_sizes(self, case: Case) -> dict[str, tuple[float, ...]]:
        """The buckets of each arm in MiB, as a rank last logged them."""
        sizes = {}
        for place in places(case, list(self.values(case.context))):
            found = [
                tuple(event.get("sizes_mib") or ())
                for rank in case.completed(place.launch).ranks
                for event in rank.ddp_buckets
                if place.inside is None or event.get("arm") == place.inside
            ]
            sizes[place.arm] = found[-1] if found else ()
        return sizes

    def _best(self, case: Case) -> Finding:

        effect = self._buckets_differ(case)
        if effect.code is Reason.NO_EFFECT:
            return invalid(
                Reason.NO_EFFECT, f"no arm is comparable: {effect.reason}", evidence=effect.evidence
            )
        decision = self.decision(case)
        kept = decision.winner or self.control(case.context)
        tie = decision.outcome is Decided.TIE
        return self.answer(case, decision, note=f"; the configured {kept} MB stays" if tie else "")

    def choice(self, case: Case) -> str | None:
        """The winner's size, or the configured one; none where the sizes did nothing."""
        if self._buckets_differ(case).code is not Reason.OK:
            return None
        winner = self.decision(case).winner
        return self.values(case.context)[winner or self.control(case.context)]

    def notes(self, last_50s: Mapping[str, Measurement]) -> list[str]:
        """What requirement W4 would choose: the highest mean, among equal means the lower stdev."""
        chosen = max(
            last_50s, key=lambda arm: (float(last_50s[arm].value), -(last_50s[arm].stdev or 0.0))
        )
        return [f"by the documented rule alone (W4: highest mean, tie: lower stdev): {chosen}"]


def _size_problems(sizes: Mapping[str, tuple[float, ...]], *, same: bool) -> Iterator[str]:
    for arm, size in sizes.items():
        if not size:
            yield f"arm {arm}: no bucket sizes logged"
        elif len(size) == 1:
            yield f"arm {arm}: one bucket of {size[0]:.2f} MiB, so the size changed nothing"
    if not same and len(set(sizes.values())) < len(sizes):
        yield "two arms had the same buckets"
