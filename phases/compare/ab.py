"""A phase that compares the values of one toggle, each value an arm."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from phases.compare import launch_name, places, reproduces_baseline, samples, source_log
from phases.compare.rates import last50_of, rate_table
from phases.kit import commands
from phases.kit.case import Case, optional
from phases.kit.finding import Finding, invalid, passed
from phases.kit.measure import decided, derived, effective_rate, estimated
from phases.kit.rows import Row, RowPhase, contract_only
from phases.training import require_sound, toggles_row
from phases.training.as_planned import effect_problem
from phases.training.plausible import alike
from runbook.config.registry import Judgement, PlanContext
from runbook.records import Launch, Measurement, Outcome, Reason
from runbook.records.evidence import TrainingLog
from runbook.stats import AA_PLAN, Decided, Decision, FloatArray
from runbook.stats.arms import best_arm_sequential, complete_rounds
from runbook.stats.throughput import block_step_times, block_throughputs

if TYPE_CHECKING:
    import pandas as pd


class AbPhase(RowPhase):
    """Arms that differ in `toggle` only, in turns inside one launch or in launches of their own.

    `compared` is what the arms differ in, in words; `ratio` names the measured ratio and
    `table_title` the table. `ordered_first` as in `interleaved`. With `unset_is_control`, leaving
    the toggle unset means the control arm.
    """

    toggle: ClassVar[str]
    compared: ClassVar[str]
    ratio: ClassVar[str]
    table_title: ClassVar[str]
    table_column: ClassVar[str] = "arm"
    ordered_first: ClassVar[bool] = False
    unset_is_control: ClassVar[bool] = False
    reads = ("baseline",)

    @abstractmethod
    def values(self, context: PlanContext) -> Mapping[str, str]:
        """The toggle's value in each arm; an A/A has two arms of one value."""

    @abstractmethod
    def control(self, context: PlanContext) -> str:
        """The arm that must reproduce the baseline phase."""

    @abstractmethod
    def decide(
        self, context: PlanContext, rounds: pd.DataFrame, steps: FloatArray | None, *, final: bool
    ) -> Decision:
        """The decision from complete rounds, by columns arm, block and value; not asked in an A/A.

        steps: of blocks the seconds of each step, [rounds, arms, steps]. final: no more will come.
        """

    @abstractmethod
    def choice(self, case: Case) -> str | None:
        """The toggle's value for later phases; not asked in an A/A."""

    def judged(
        self, context: PlanContext, rounds: pd.DataFrame, steps: FloatArray | None, *, final: bool
    ) -> Decision:
        """`decide`, or of equal arms: does either look better than the other?"""
        if context.aa:
            return best_arm_sequential(rounds, plan=AA_PLAN, steps=steps, final=final)
        return self.decide(context, rounds, steps, final=final)

    def may_fail(self, context: PlanContext, arm: str) -> bool:  # noqa: ARG002
        """Whether the comparison can do without this arm."""
        return False

    def notes(self, last_50s: Mapping[str, Measurement]) -> list[str]:  # noqa: ARG002
        """Notes below the table."""
        return []

    @property
    def ignored(self) -> tuple[str, ...]:
        """What may differ between the arms, as in `differences`."""
        return (f"toggles.{self.toggle}",)

    def compares(self, context: PlanContext) -> Mapping[str, str]:
        """The toggle, as the control has it."""
        return {self.toggle: self.values(context)[self.control(context)]}

    @contract_only
    def plan(self, context: PlanContext) -> list[Launch]:
        """Randomized blocks in one launch, else one launch per arm and round."""
        if self.excluded(context):
            return []
        arms = {arm: {self.toggle: value} for arm, value in self.values(context).items()}
        if context.protocol == "blocks":
            return [
                commands.interleaved(
                    context,
                    phase=self.name,
                    arms=arms,
                    without=(self.toggle,),
                    ordered_first=self.ordered_first,
                    purpose=f"{self.compared}: the arms take turns in balanced order",
                )
            ]
        settings = context.profile.phases[self.name]
        return [
            commands.trainer_launch(
                context,
                phase=self.name,
                name=launch_name(arm, number),
                steps=commands.scaled(settings.single_steps or settings.steps, context),
                env={**commands.environment(context, self.name), **values},
                optional=self.may_fail(context, arm),
                purpose=f"{self.compared}: {arm}, round {number}",
            )
            for number in range(1, commands.launches_per_arm(context, self.name) + 1)
            for arm, values in arms.items()
        ]

    def alike_rows(self) -> tuple[Row, ...]:
        """Rows `comparable` and `toggles_effective`."""
        return (
            self.row.together("comparable", partial(alike, but=self.ignored)),
            toggles_row(self.names, but=(self.toggle,)),
        )

    def reproduces(self, case: Case) -> Finding:
        """The answer of row `control`."""
        place = next(places(case, [self.control(case.context)]))
        # The environment of an interleaved launch does not have the toggle of its arms.
        ignored = self.ignored if place.inside or self.unset_is_control else ()
        return reproduces_baseline(case, launch=place.launch, arm=place.inside, but=ignored)

    def enough(self, log: TrainingLog, launch: Launch, context: PlanContext) -> bool:
        """Stop when the sequential plan has decided."""

        if launch.schedule is None or not len(log.frame):
            return False
        whole, _ = complete_rounds(block_throughputs(log))
        if whole.empty or whole["arm"].nunique() < len(self.values(context)):
            return False
        steps = block_step_times(log, whole)
        return not self.judged(context, whole, steps, final=False).go_on

    def effect_problems(self, case: Case) -> Iterator[str]:
        """Why an arm is not proven to have run with its value, over all arms and rounds."""
        values = self.values(case.context)
        for place in places(case, list(values)):
            launch = case.completed(place.launch)
            problem = effect_problem(launch, self.toggle, values[place.arm], arm=place.inside)
            if problem:
                yield problem

    def measured(self, case: Case) -> Measurement:
        """The throughput of the log that stands for the comparison, with every compared file."""
        arms = list(self.values(case.context))
        first = effective_rate(source_log(case, arms))
        names = dict.fromkeys(place.launch for place in places(case, arms))
        logs = [effective_rate(case.log(name)) for name in names]
        return derived(first, also=logs)

    def decision(self, case: Case) -> Decision:
        """The decision on this evidence; raises a finding where its launches do not count."""

        require_sound(case, self.names(case), but=self.ignored)
        frame = samples(case, list(self.values(case.context)))
        blocks = case.context.protocol == "blocks"
        steps = block_step_times(case.log(commands.INTERLEAVED), frame) if blocks else None
        return self.judged(case.context, frame, steps, final=True)

    def answer(self, case: Case, decision: Decision, *, note: str = "") -> Finding:
        """The decision as a finding; an A/A must not find a difference, in either direction.

        What is undecided stays unset and passes where throughput decides nothing.
        """

        value = estimated(self.measured(case), decision, name=self.ratio, unit="ratio")
        if case.context.aa and decision.outcome is Decided.WINNER:
            reason = f"an A/A run found a difference between equal arms: {decision.reason}"
            return invalid(Reason.NOT_PLAUSIBLE, reason, measurement=value)
        text = f"{decision.outcome.value}: {decision.reason}{note}"
        finding = decided(decision, value, reason=text)
        if finding.outcome is Outcome.PASS or case.profile.throughput_gated:
            return finding
        text = f"not gated on profile {case.profile.name}, nothing was decided: {decision.reason}"
        reason = f"{text}{note}; {self.toggle} stays as it is"
        found = passed(reason, measurement=finding.measurement)
        return replace(found, code=Reason.NOT_GATED)

    def details(self, case: Case) -> Judgement:
        """The table of the arms, and the value for later phases."""
        where = list(places(case, list(self.values(case.context))))
        rated = [(p.arm if p.inside else p.launch, p.launch, p.inside) for p in where]
        title, column = self.table_title, self.table_column
        # Of launches of its own, an arm's first one stands for it.
        last_50s = {
            place.arm: last
            for place in reversed(where)
            if (last := last50_of(case, place.launch, place.inside)) is not None
        }
        choice = None if case.context.aa else optional(partial(self.choice, case))
        return Judgement(
            tables=(rate_table(case, rated, title=title, column=column),),
            measurements=tuple(reversed(last_50s.values())),
            choices={self.toggle: choice} if choice else {},
            notes=self.notes(last_50s) if last_50s else [],
        )
