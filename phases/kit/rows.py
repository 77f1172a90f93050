"""A phase made of declared rows: the declaration is the list of checks, so none can vanish."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import ClassVar, TypeVar

from phases.kit import table
from phases.kit.case import Case
from phases.kit.finding import Finding, ending, incomplete, invalid, skipped
from phases.kit.playbook import Situation, fitting, remedy_for, situation_of, told
from runbook.config.registry import Judgement, Phase, PlanContext
from runbook.errors import RunbookError
from runbook.records import Check, Launch, Outcome, Reason, satisfies
from runbook.records.evidence import PhaseEvidence

S = TypeVar("S")
# What is said of one launch.
Answer = Callable[[Case, str], Finding]
# What statistics and decisions raise on values that cannot be: zero or negative times, NaN.
_IMPOSSIBLE = (RunbookError, ArithmeticError)
_FINE = (Outcome.PASS, Outcome.SKIPPED)


@dataclass(frozen=True)
class Row:
    """One question of the acceptance table, and how to answer it from a case.

    `what` ends the id of its check; `topic` is the playbook's entry that fixes it; `needs` names
    the phases without which running this row's phase again does not answer it. `rests_on` names a
    row of this phase without which this one has nothing to measure, `restates` one that judges the
    same number: where that one is not PASS either, this one may only follow from it. `own`: it has
    an answer for a trainer of one's own, which writes nothing of our trainer's contract.
    """

    what: str
    question: str
    answer: Callable[[Case], Finding]
    topic: str = ""
    needs: tuple[str, ...] = ()
    rests_on: str = ""
    restates: str = ""
    own: bool = False


@dataclass(frozen=True)
class RowsOf:
    """Makes the rows of a section of `rows.yaml`, about these launches of a case."""

    section: str
    names: Callable[[Case], Sequence[str]] = field(default=lambda _: ())

    def one(self, what: str, answer: Callable[[Case], Finding]) -> Row:
        """A row that is asked once."""
        words = dict(table("rows")[self.section][what])
        needs = tuple(words.pop("needs", ()))
        return Row(what, answer=answer, needs=needs, **words)

    def each(self, what: str, answer: Answer) -> Row:
        """A row that asks every launch: the worst answer counts."""
        return self.one(what, lambda case: first_problem(answer, case, self.names(case)))

    def together(self, what: str, answer: Callable[[Case, Sequence[str]], Finding]) -> Row:
        """A row that all launches answer together."""
        return self.one(what, lambda case: answer(case, self.names(case)))


class RowPhase(Phase):
    """A phase whose checks are exactly its declared rows, in their order.

    `needs` names the phases without which running this one again answers nothing.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """The rows, whatever evidence there will be."""

    def asked(self, context: PlanContext) -> Sequence[Row]:  # noqa: ARG002
        """The rows that this run has; every run has `rows`."""
        return self.rows()

    def instead(self, case: Case, row: Row) -> Finding | None:  # noqa: ARG002
        """What a row says where its question does not arise; None where it does."""
        return None

    def names(self, case: Case) -> Sequence[str]:
        """Names of the planned launches."""
        return [launch.name for launch in self.plan(case.context)]

    @property
    def row(self) -> RowsOf:
        """Makes this phase's rows, about the planned launches."""
        return RowsOf(self.name, self.names)

    def details(self, case: Case) -> Judgement:  # noqa: ARG002
        """Tables, measurements, series, choices and notes; the checks come from the rows."""
        return Judgement()

    def check_ids(self, context: PlanContext) -> tuple[str, ...]:
        """Ids of all rows."""
        return tuple(f"{self.name}.{row.what}" for row in self.asked(context))

    def own_checks(self, context: PlanContext) -> tuple[str, ...]:
        """Ids of the rows that have an answer for one, where the phase starts anything with it."""
        rows = self.rows() if self.plan(context) else ()
        return tuple(f"{self.name}.{row.what}" for row in rows if row.own)

    def judge(self, evidence: PhaseEvidence, context: PlanContext) -> Judgement:
        """Answer every row; one that cannot be answered says what is missing."""
        case = Case(phase=self.name, evidence=evidence, context=context)
        if why := self.excluded(context):
            finding = skipped(Reason.NOT_COMPARABLE, why)
            return Judgement(
                checks=[self._check(row, finding, case) for row in self.asked(context)]
            )
        rows = self.asked(context)
        if case.profile.own_trainer and not self.plan(context):
            # Of a phase that starts nothing with a trainer of one's own, no row is its.
            rows = [replace(row, own=False) for row in rows]
        found = {row.what: answered(row, case, self.instead) for row in rows}
        checks = [self._check(row, self._traced(row, found), case) for row in rows]
        try:
            details = self.details(case)
        except (Finding, *_IMPOSSIBLE) as missing:
            details = Judgement(notes=(f"no tables: {missing}",))
        ends = {name: self._advised("", end, now, context) for name, end, now in _bad_ends(case)}
        return replace(
            details,
            checks=tuple(checks),
            remedies={name: remedy for name, (remedy, _) in ends.items()},
            first_commands={name: typed for name, (_, typed) in ends.items() if typed},
        )

    def _traced(self, row: Row, found: Mapping[str, Finding]) -> Finding:
        """The row's finding, following from another row's where that explains it."""
        finding = found[row.what]
        for name, explains in ((row.rests_on, _leaves_nothing), (row.restates, _says_the_same)):
            base = found.get(name)
            if base is not None and base.outcome not in _FINE and explains(base, finding):
                return replace(finding, follows=f"{self.name}.{name}")
        return finding

    def _check(self, row: Row, finding: Finding, case: Case) -> Check:
        context = case.context
        check_id = f"{self.name}.{row.what}"
        required = check_id in context.profile.required
        # What is required and was skipped keeps the run from GO as a failure does.
        fine = satisfies(finding) or (finding.outcome is Outcome.SKIPPED and not required)
        needs_advice = not fine or finding.code is Reason.WARNING
        launches = tuple(case.evidence.launches.values())
        now = situation_of(case.profile, launches, finding.evidence)
        remedy, typed = self._advised(row.topic, finding, now, context, row.needs)
        said = {name: value for name, value in vars(finding).items() if name != "topic"}
        if (limit := said.pop("limit")) is not None:
            said |= {"comparator": limit.spec.comparator, "limit": limit.value}
            said["limit_source"] = limit.source
        return Check(
            id=check_id,
            phase=self.name,
            question=row.question,
            remedy=remedy if needs_advice else "",
            rerun="" if fine else context.rerun(*self._again(row.needs)),
            first_command="" if fine else typed,
            required=required,
            **said,
        )

    def _again(self, needs: Sequence[str]) -> tuple[str, ...]:
        """The phases that are run again to answer a row with these needs."""
        return (*dict.fromkeys((*needs, *self.needs)), self.name)

    def _advised(
        self,
        topic: str,
        found: Finding,
        now: Situation,
        context: PlanContext,
        needs: Sequence[str] = (),
    ) -> tuple[str, str]:
        """What to do about a finding, and what to type first where the remedy has that."""
        remedy = remedy_for(topic, found.code, now, own=found.topic)
        typed = (one for one in fitting(remedy, now) if one.command or one.settings)
        if (first := next(typed, None)) is None:
            return told(remedy, now), ""
        adding = [now.filled(text) for text in first.settings]
        return told(remedy, now), first.command or context.rerun(*self._again(needs), adding=adding)


def answered(
    row: Row, case: Case, instead: Callable[[Case, Row], Finding | None] = lambda *_: None
) -> Finding:
    """The row's answer, or what it says `instead`; what keeps it from having one is one too."""
    try:
        if case.profile.own_trainer and not row.own:
            return needs_contract(case)
        return instead(case, row) or row.answer(case)
    except Finding as nothing:
        return nothing
    except _IMPOSSIBLE as error:
        return invalid(Reason.NOT_PLAUSIBLE, f"nothing can be computed from these numbers: {error}")


def _leaves_nothing(base: Finding, finding: Finding) -> bool:
    """Has the machine not got what it asks for, or was its launch refused alike?"""
    return bool(finding.follows) and finding.code in (Reason.MISSING_ARTIFACT, base.code)


def _says_the_same(base: Finding, finding: Finding) -> bool:
    return finding.outcome not in _FINE and finding.code is base.code


def _bad_ends(case: Case) -> Iterator[tuple[str, Finding, Situation]]:
    for name, launch in case.evidence.launches.items():
        end = ending(launch)
        if end.outcome is not Outcome.PASS:
            yield name, end, situation_of(case.profile, [launch], ranks=launch.launch.nproc)


def needs_contract(case: Case) -> Finding:
    """What a check says that a trainer of one's own leaves nothing to be answered from."""
    own = case.profile.own_trainer
    reason = (
        f"{own.name if own else 'this'} is a trainer of your own: this needs evidence that only a "
        "trainer with the contract writes"
    )
    return skipped(Reason.NEEDS_CONTRACT, reason)


def contract_only(
    plan: Callable[[S, PlanContext], list[Launch]],
) -> Callable[[S, PlanContext], list[Launch]]:
    """A plan that starts nothing with a trainer of one's own, which has none of our toggles."""

    @wraps(plan)
    def planned(phase: S, context: PlanContext) -> list[Launch]:
        return [] if context.profile.own_trainer else plan(phase, context)

    return planned


def first_problem(answer: Answer, case: Case, names: Sequence[str]) -> Finding:
    """The worst finding over several launches; PASS only if all pass.

    It has the number that is nearest to its limit, or the first where nothing limits it. A warning
    is worse than a plain PASS: it must not vanish behind one.
    """
    if not names:
        return incomplete(Reason.NOT_RUN, "no launch was planned")
    findings = [_caught(answer, case, name) for name in names]
    worst = min(findings, key=_order)
    if worst.outcome is not Outcome.PASS or worst.code is Reason.WARNING or len(findings) == 1:
        return worst
    paths = tuple(dict.fromkeys(path for found in findings for path in found.evidence))
    return replace(worst, reason=f"{len(findings)} launches: {worst.reason}", evidence=paths)


def ends(case: Case, names: Sequence[str]) -> Finding:
    """The worst end of these launches."""
    return first_problem(lambda _, name: ending(case.launch(name)), case, names)


def _caught(answer: Answer, case: Case, name: str) -> Finding:
    try:
        return answer(case, name)
    except Finding as nothing:
        return nothing


def _order(found: Finding) -> tuple[int, bool, float]:
    """The worst outcome first, then warnings, then how far the number is from its limit."""
    return (found.outcome.rank, found.code is not Reason.WARNING, _room(found))


def _room(found: Finding) -> float:
    limit, measured = found.limit, found.measurement
    if measured is None or limit is None:
        return 0.0
    room = float(measured.value) - limit.value
    return room if limit.spec.floor else -room
