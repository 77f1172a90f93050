"""Rows that hold throughputs against each other: arms, ranks, nodes, a floor, earlier runs.

Here: a phase that compares the values of one toggle, each value an arm; where each arm ran, its
throughput, and a fault of an optional arm.
"""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from nsa.contract import ELSEWHERE, OUT_OF_MEMORY_PREFIX
from phases.compare.rates import last50_of, rate_table
from phases.kit import CONTROL_LEAST, commands
from phases.kit.case import Case, optional
from phases.kit.commands import INTERLEAVED, launches_per_arm
from phases.kit.finding import (
    Finding,
    ending,
    failed,
    incomplete,
    inconclusive,
    invalid,
    passed,
    skipped,
    warned,
)
from phases.kit.measure import decided, derived, effective_rate, estimated
from phases.kit.rows import Row, RowPhase, contract_only
from phases.training import require_sound, toggles_row
from phases.training.as_planned import effect_problem
from phases.training.plausible import alike, differences
from runbook.config.registry import Judgement, PlanContext
from runbook.records import Launch, Measurement, Outcome, Reason
from runbook.records.evidence import Frame, LaunchEvidence, TrainingLog
from runbook.stats import AA_PLAN, Decided, Decision, FloatArray
from runbook.stats.arms import best_arm_sequential, complete_rounds, rounds_of, t_quantile
from runbook.stats.throughput import StatisticsError, block_step_times, block_throughputs, effective


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one arm ran: the launch, the arm's name in its CSV (None: the whole launch)."""

    arm: str
    launch: str
    inside: str | None
    round: int


# An arm that ended its launch, or that the trainer refused, and how.
ArmFault = tuple[str, Finding]


def blamed(arm: str, end: Finding) -> ArmFault:
    """The arm with its end, which has a remedy of its own where memory ran out."""
    return arm, replace(end, topic="memory" if end.code is Reason.OUT_OF_MEMORY else "")


def launch_name(arm: str, number: int) -> str:
    """Name of an arm's own launch in round `number`."""
    return f"{arm}_r{number}"


def places(case: Case, arms: Sequence[str]) -> Iterator[Place]:
    """Every place where an arm was planned to run, the interleaved launch once per arm."""
    if case.context.protocol == "blocks":
        for arm in arms:
            yield Place(arm=arm, launch=INTERLEAVED, inside=arm, round=0)
        return
    for number in range(1, launches_per_arm(case.context, case.phase) + 1):
        for arm in arms:
            yield Place(arm=arm, launch=launch_name(arm, number), inside=None, round=number)


def samples(case: Case, arms: Sequence[str]) -> Frame:
    """Throughput of each arm in each complete round: columns arm, block, value.

    Raises a finding where a launch has no evidence or no round is complete.
    """
    import pandas as pd

    try:
        if case.context.protocol == "blocks":
            frame = block_throughputs(case.log(INTERLEAVED))
        else:
            rows = [
                (place.arm, place.round, float(effective(case.log(place.launch)).value))
                for place in places(case, arms)
            ]
            frame = pd.DataFrame(rows, columns=["arm", "block", "value"])
    except StatisticsError as error:
        raise incomplete(Reason.TOO_FEW_SAMPLES, str(error)) from error
    missing = [arm for arm in arms if arm not in set(frame["arm"])]
    if missing:
        reason = f"no complete block of arm {', '.join(missing)}"
        raise incomplete(Reason.TOO_FEW_SAMPLES, reason)
    whole, _ = complete_rounds(frame)
    if whole.empty:
        raise incomplete(Reason.TOO_FEW_SAMPLES, "no complete round of all arms")
    return whole


def source_log(case: Case, arms: Sequence[str]) -> TrainingLog:
    """The log that stands for the comparison: the interleaved one, or the first arm's first."""
    return case.log(next(places(case, arms)).launch)


def arm_fault(case: Case, *, optional_arms: Sequence[str]) -> ArmFault | None:
    """The optional arm that ended the launch of all arms or was refused in it; None if none did.

    A launch that ended badly is blamed on the arm whose turn it was, by the rows written. An
    arm that no other arm's block preceded explains nothing: then the launch itself is at fault.
    """
    if INTERLEAVED not in case.evidence.launches:
        return None
    launch = case.launch(INTERLEAVED)
    fault = refused(launch, optional_arms)
    if fault or launch.result.ok:
        return fault
    schedule = launch.launch.schedule
    end = ending(launch)
    if schedule is None or end.outcome is not Outcome.FAIL:
        return None
    # Whose block holds the row after the written ones.
    rows = 0 if launch.training is None else len(launch.training.frame)
    order = [arm for arms in schedule.rounds for arm in arms]
    turn = order[rows // (schedule.steps + schedule.warmup_steps) :][:1]
    if not turn or turn[0] not in optional_arms or turn[0] == order[0]:
        return None
    return blamed(turn[0], end)


def refused(launch: LaunchEvidence, arms: Sequence[str]) -> ArmFault | None:
    """The first of the arms that the trainer refused, by the word of the rank that could not."""
    found = [
        (str(failure.get("error") or "no error recorded"), str(failure["arm"]), rank.path)
        for rank in launch.ranks
        for failure in rank.arm_failures
        if failure.get("arm") in arms
    ]
    if not found:
        return None
    error, arm, path = min(found, key=lambda item: (item[1] != found[0][1], ELSEWHERE in item[0]))
    code = Reason.OUT_OF_MEMORY if error.startswith(OUT_OF_MEMORY_PREFIX) else Reason.CRASH
    return blamed(arm, failed(code, f"arm {arm} failed: {error}", evidence=(path,)))


def dropped(case: Case, row: Row, fault: ArmFault | None) -> Finding | None:
    """What a row says where a fault of an optional arm ended the launch, its own affair.

    Row `completed` says so as a warning, and the others have nothing left to judge. None where the
    trainer went on without the arm.
    """
    if fault is None or all(one.result.ok for one in case.evidence.launches.values()):
        return None
    arm, end = fault
    reason = f"the optional arm {arm} ended the launch ({end.reason})"
    if row.what == "completed":
        return warned(f"{reason}: that arm is dropped", evidence=end.evidence)
    return skipped(end.code, reason, evidence=end.evidence, follows=end.follows)


def unlike_baseline(case: Case, name: str, *, but: Sequence[str]) -> Finding | None:
    """INVALID if this launch differs from a launch of the baseline; `but` as in `differences`.

    Raises a finding where the baseline or an env.json is missing.
    """
    before = case.earlier("baseline")
    for first in before.evidence.launches:
        if unlike := differences(before.env(first), case.env(name), but=but):
            reason = f"baseline against {name}: {'; '.join(unlike)}"
            paths = (before.launch(first).path("env"), case.launch(name).path("env"))
            return invalid(Reason.NOT_COMPARABLE, reason, evidence=paths)
    return None


# Two-sided error of the prediction interval.
_ERROR = 0.01


def _prediction_interval(rates: Sequence[float]) -> tuple[float, float]:
    """Where one more launch falls in 99 % of cases, at least 5 % to either side."""
    logs, count = [math.log(rate) for rate in rates], len(rates)
    mean, spread = statistics.fmean(logs), statistics.stdev(logs)
    reach = t_quantile(_ERROR / 2, count - 1) * spread * math.sqrt(1 + 1 / count)
    half = max(reach, math.log1p(CONTROL_LEAST))
    return math.exp(mean - half), math.exp(mean + half)


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
        self, context: PlanContext, rounds: Frame, steps: FloatArray | None, *, final: bool
    ) -> Decision:
        """The decision from complete rounds, by columns arm, block and value; not asked in an A/A.

        steps: of blocks the seconds of each step, [rounds, arms, steps]. final: no more will come.
        """

    @abstractmethod
    def choice(self, case: Case) -> str | None:
        """The toggle's value for later phases; not asked in an A/A."""

    def judged(
        self, context: PlanContext, rounds: Frame, steps: FloatArray | None, *, final: bool
    ) -> Decision:
        """`decide`, or of equal arms: does either look better than the other?"""
        if context.aa:
            arms, values = rounds_of(rounds)
            return best_arm_sequential(arms, values, plan=AA_PLAN, steps=steps, final=final)
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
            for number in range(1, launches_per_arm(context, self.name) + 1)
            for arm, values in arms.items()
        ]

    def alike_rows(self) -> tuple[Row, ...]:
        """Rows `comparable` and `toggles_effective`."""
        return (
            self.row.together("comparable", partial(alike, but=self.ignored)),
            toggles_row(self.names, but=(self.toggle,)),
        )

    def reproduces(self, case: Case) -> Finding:
        """Row `control`: PASS if that arm's throughput lies where one more baseline launch would.

        99 % prediction interval of one further launch, on the log scale.
        """
        if "baseline" not in case.evidence.earlier:
            return skipped(Reason.NOT_ASKED_FOR, "the baseline phase is not part of this run")
        place = next(places(case, [self.control(case.context)]))
        control = effective_rate(case.log(place.launch), arm=place.inside)
        if not case.profile.throughput_gated:
            reason = (
                f"control arm {control}; throughput is not gated on profile {case.profile.name}"
            )
            return skipped(Reason.NOT_GATED, reason, measurement=control)
        # The environment of an interleaved launch does not have the toggle of its arms.
        ignored = self.ignored if place.inside or self.unset_is_control else ()
        if unlike := unlike_baseline(case, place.launch, but=ignored):
            return unlike
        before = case.earlier("baseline")
        launches = [effective_rate(before.log(name)) for name in before.evidence.launches]
        rates = [float(rate.value) for rate in launches]
        if len(rates) < 2:
            reason = (
                "one baseline launch has no interval; `--protocol single` cannot check its control"
            )
            return inconclusive(Reason.TOO_FEW_SAMPLES, reason, measurement=control)
        low, high = _prediction_interval(rates)
        value = derived(control, name="control", interval=(low, high), also=launches)
        expected = f"one more baseline launch: {low:.4g} to {high:.4g}"
        reason = f"control {float(control.value):.4g} tok/s, {expected}"
        if low <= float(control.value) <= high:
            return passed(reason, measurement=value)
        return invalid(Reason.NOT_COMPARABLE, reason, measurement=value)

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
        steps = block_step_times(case.log(INTERLEAVED), frame) if blocks else None
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
