"""Is HEAD slower than a pinned reference commit, launched in turn with it the same night?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random

from phases.compare.rates import cell
from phases.kit import specs
from phases.kit.case import Case, optional
from phases.kit.commands import trainer_launch
from phases.kit.finding import Finding, incomplete, invalid, passed, warned
from phases.kit.measure import decided, estimated
from phases.kit.rows import Row, RowPhase, contract_only, ends, first_problem
from phases.training import require_sound, training_rows
from phases.training.plausible import alike
from runbook.config.registry import Judgement, PlanContext
from runbook.records import Launch, Measurement, Outcome, Reason, Table
from runbook.records.evidence import PhaseEvidence
from runbook.stats import REGRESSION_PLAN, Decision, balanced_rounds
from runbook.stats.arms import regression
from runbook.stats.throughput import StatisticsError, per_cpu_second, typical

_REFERENCE, _HEAD = _SIDES = ("reference", "head")
# What the two sides may differ in: they are different commits.
_COMMITS = ("git.sha", "git.diff_sha256", "package.sha256")
# Where the pairs of a night differ by more (standard deviation of the log ratios), three nights
# find a loss of 5 % in about three of four cases or fewer: a pass then says little.
_NOISY = 0.08
# That a machine without a GPU has other processes beside it is why CPU time decides there.
_NOT_DECIDING = ("devices",)


class Regression(RowPhase):
    """The nightly comparison of two commits.

    Each side runs from a clean checkout of its own commit. What decides is the typical pace of each
    launch (tokens over the median step), by the clock where throughput is gated, else by the ranks'
    processor time. Rounds follow `REGRESSION_PLAN`.
    """

    name = "regression"
    order = 110
    title = "Regression against a pinned commit"
    source = "choice"
    question = "Is this commit slower than the reference?"
    optional = True
    compares_commits = True
    limits = specs("flaky_launches")

    @contract_only
    def plan(self, context: PlanContext) -> list[Launch]:
        """Rounds of one launch of each side, in balanced order; the later ones on suspicion."""
        if not (context.reference and context.head):
            return []
        plan = REGRESSION_PLAN
        random = Random(f"{self.name}:{context.seed}")  # noqa: S311 - an order, not a secret
        rounds = balanced_rounds(_SIDES, plan.first + plan.more, random)
        commits = {_REFERENCE: context.reference, _HEAD: context.head}
        why = "if a loss is suspected: "
        return [
            trainer_launch(
                context,
                phase=self.name,
                name=_name(number, side),
                purpose=f"{why * (number > plan.first)}round {number}, {side} {commits[side][:12]}",
                commit=commits[side],
                conditional=number > plan.first,
            )
            for number, order in enumerate(rounds, start=1)
            for side in order
        ]

    def needs_more(self, evidence: PhaseEvidence, context: PlanContext) -> Sequence[str]:
        """The later rounds if the first make a loss likely; not where they cannot be compared."""
        case = Case(phase=self.name, evidence=evidence, context=context)
        decision = optional(lambda: _decide(*_paces(case)))
        later = decision is not None and decision.go_on
        return [one.name for one in self.plan(context) if one.conditional and later]

    def names(self, case: Case) -> Sequence[str]:
        """The launches of the first rounds, and of the later ones if they were started."""
        return _of(*_SIDES)(case)

    def rows(self) -> Sequence[Row]:
        """HEAD trains as it should, the reference still runs, both are what they say; the pace."""
        rows = [row for row in training_rows(_of(_HEAD)) if row.what not in _NOT_DECIDING]
        return (
            *rows,
            self.row.one("reference", _runs),
            self.row.each("checkouts", _own_commit),
            self.row.together("comparable", partial(alike, but=_COMMITS)),
            self.row.one("pace", _pace),
        )

    def details(self, case: Case) -> Judgement:
        """Every round with both paces and their ratio."""
        paces = list(_pairs_there(case))
        unit = paces[0][1].unit if paces else ""
        rows = tuple(
            (number, cell(first), cell(second), f"{_ratio(first, second) - 1:+.2%}")
            for number, first, second in paces
        )
        context = case.context
        commits = f"reference {context.reference[:12]}, head {context.head[:12]}"
        table = Table(
            title="Rounds, reference against head",
            columns=("round", f"reference {unit}", f"head {unit}", "head / reference"),
            rows=rows,
            note=f"{commits}; {_basis(case)}, tokens over the median step of each launch",
        )
        measured = [pace for _, *pair in paces for pace in pair]
        return Judgement(tables=(table,), measurements=measured)


def _name(number: int, side: str) -> str:
    return f"round{number:02d}_{side}"


def _ratio(first: Measurement, second: Measurement) -> float:
    return float(second.value) / float(first.value)


def _rounds(case: Case) -> Iterator[int]:
    """The rounds by number: the first ones always, later ones once they started."""
    if not case.context.reference:
        return
    for number in range(1, REGRESSION_PLAN.first + REGRESSION_PLAN.more + 1):
        started = {_name(number, side) for side in _SIDES} & set(case.evidence.launches)
        if number <= REGRESSION_PLAN.first or started:
            yield number


def _of(*sides: str) -> Callable[[Case], Sequence[str]]:
    """The launches of these sides, round by round."""
    return lambda case: [_name(number, side) for number in _rounds(case) for side in sides]


def _runs(case: Case) -> Finding:
    """PASS if every launch of the reference counts; its faults are no news, so INVALID."""
    names = _of(_REFERENCE)(case)
    found = ends(case, names)
    if found.outcome is Outcome.PASS:
        try:
            require_sound(case, names)
        except Finding as unsound:
            found = unsound
    # HEAD was refused too: then it is not the reference that is wrong.
    refused = ends(case, _of(_HEAD)(case)).code is Reason.WRONG_ENVIRONMENT
    if found.outcome in (Outcome.PASS, Outcome.INCOMPLETE) or refused:
        return found
    reason = f"the reference does not run here as it has to: {found.reason}"
    return invalid(Reason.WRONG_ENVIRONMENT, reason, evidence=found.evidence, topic="reference")


def _own_commit(case: Case, name: str) -> Finding:
    """PASS if a clean checkout of the planned commit is what the trainer says that it ran.

    Two sources: git and the files, read by the harness before the launch, and the trainer's own
    env.json, by the package that it had loaded.
    """
    launch, env = case.completed(name), case.env(name)
    paths = (launch.path("checkout"), launch.path("env"))
    there = launch.checkout
    if there is None:
        reason = f"{name}: nothing says which checkout it ran from"
        return incomplete(Reason.MISSING_ARTIFACT, reason, evidence=paths)
    wanted, git, package = launch.launch.commit, env.get("git") or {}, env.get("package") or {}
    problems = [
        f"{what} is {got!r}, wanted {want!r}"
        for what, got, want in (
            ("the checkout's commit", there.get("sha"), wanted),
            ("what is changed in it", there.get("changed"), []),
            ("git.sha of env.json", git.get("sha"), wanted),
            ("git.dirty of env.json", git.get("dirty"), False),
            ("package.path of env.json", package.get("path"), there.get("path")),
            ("package.sha256 of env.json", package.get("sha256"), there.get("sha256")),
        )
        if got != want
    ]
    if problems or not there.get("sha256"):
        reason = f"{name}: {'; '.join(problems) or 'no digest of its package'}"
        return invalid(Reason.MISMATCH, reason, evidence=paths)
    reason = f"{name} ran {wanted[:12]}, package digest {str(package['sha256'])[:12]}"
    return passed(reason, evidence=paths)


def _basis(case: Case) -> str:
    return "by the clock" if case.profile.throughput_gated else "by the ranks' CPU time"


def _pace_of(case: Case, name: str) -> Measurement:
    """Tokens over the median step of one launch, by the clock or by processor time."""

    log = case.log(name)
    try:
        if case.profile.throughput_gated:
            return typical(log)
        return per_cpu_second(log, case.launch(name).ranks)
    except StatisticsError as error:
        found = invalid(Reason.NOT_COMPARABLE, f"{name}: {error}", evidence=(log.path,))
        raise found from error


def _paces(case: Case) -> tuple[list[Measurement], list[Measurement]]:
    """The paces of the reference's and of HEAD's launches; raises where one does not count."""
    reference = _runs(case)
    if reference.outcome is not Outcome.PASS:
        raise reference
    require_sound(case, _of(*_SIDES)(case), but=_COMMITS)
    first, second = ([_pace_of(case, name) for name in _of(side)(case)] for side in _SIDES)
    return first, second


def _decide(first: Sequence[Measurement], second: Sequence[Measurement]) -> Decision:
    reference, head = ([float(one.value) for one in side] for side in (first, second))
    return regression(reference, head)


def _pace(case: Case) -> Finding:
    """FAIL only after all rounds, at the plan's error; INCOMPLETE where rounds are missing."""
    first, second = _paces(case)
    checked = first_problem(_own_commit, case, _of(*_SIDES)(case))
    if checked.outcome is not Outcome.PASS:
        raise checked
    decision = _decide(first, second)
    if decision.go_on:
        paths = [one.path for one in (*first, *second)]
        raise incomplete(Reason.NOT_RUN, decision.reason, evidence=paths)
    value = estimated(
        second[0], decision, name="head_over_reference", unit="ratio", note=_basis(case),
        also=[*second, *first],
    )  # fmt: skip
    reason = f"{decision.reason} ({_basis(case)})"
    ratios = [math.log(_ratio(*pair)) for pair in zip(first, second, strict=True)]
    spread = statistics.stdev(ratios)
    if decision.outcome.as_check is Outcome.PASS and spread > _NOISY:
        told = f"{reason}; pairs differ by {spread:.0%}: a loss of 5 % would hardly be found here"
        return warned(told, measurement=value, topic="quiet")
    return decided(decision, value, reason=reason)


def _pairs_there(case: Case) -> Iterator[tuple[int, Measurement, Measurement]]:
    """Rounds of which both launches have a pace, by number."""
    for number in _rounds(case):
        first, second = (optional(partial(_pace_of, case, _name(number, s))) for s in _SIDES)
        if first is not None and second is not None:
            yield number, first, second
