"""What every format shows, worked out once: rows, problems and counts of a run record.

Nothing is judged here: outcomes are the record's own. The one thing added is a row for each
required id that the record lacks, because a missing row must never look like a good one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from reports.causes import Cause, causes_of
from reports.permits import following
from reports.text import one_line
from runbook.records import Check, Outcome, PhaseRecord, Reason, RunRecord, Verdict
from runbook.records.outcome import WORST_FIRST
from runbook.records.run import Step
from runbook.text import how_many

# As a reader needs them who sees them for the first time.
_MEANINGS = {
    Outcome.INVALID.value: "it ran, but its result does not count",
    Outcome.INCOMPLETE.value: "it could not run, or left no evidence",
    Outcome.INCONCLUSIVE.value: "measured, but not decidable",
    Outcome.SKIPPED.value: "not asked for, or not needed here; never counted as passed",
}


@dataclass(frozen=True, kw_only=True)
class PhaseView:
    """A phase with its rows."""

    index: int
    record: PhaseRecord
    rows: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True)
class ReportView:
    """A whole run, ready to be shown."""

    record: RunRecord
    headline: str
    counts: str
    required_counts: str
    interruption: str
    phases: tuple[PhaseView, ...]
    rows: tuple[Check, ...]
    acceptance: tuple[Check, ...]
    missing: tuple[Check, ...]
    problems: tuple[Check, ...]
    causes: tuple[Cause, ...]
    following: tuple[Step, ...]
    left_out: tuple[str, ...]

    @property
    def own_reasons(self) -> tuple[str, ...]:
        """The reasons that no cause tells."""
        told = tuple(f"{row.id} is " for row in self.problems)
        return tuple(text for text in self.record.reasons if not text.startswith(told))

    @property
    def tally(self) -> str:
        """How many causes there are, and how the checks came out; a GO has the required ones."""
        go = self.record.verdict is Verdict.GO
        causes = [how_many(len(self.causes), "cause")] if self.causes else []
        return "; ".join([*causes, *([] if go else [self.required_counts]), self.counts])

    @property
    def words(self) -> str:
        """What the outcomes mean that are on the page; the counts show which those are."""
        shown = {row.outcome for row in (*self.rows, *self.acceptance)}
        told = [f"{name}: {text}" for name, text in _MEANINGS.items() if name in shown]
        return f"{'; '.join(told)}." if told else ""

    @property
    def untold(self) -> tuple[Step, ...]:
        """The steps that no cause tells, nor the verdict of a GO or of a run that was cut off."""
        elsewhere = self.interruption or self.record.verdict is Verdict.GO
        return () if elsewhere else tuple(s for s in self.following if s.command not in self.told)

    @property
    def told(self) -> frozenset[str]:
        """The commands that stand beside the causes that keep the run from GO."""
        return frozenset(cause.advice.command for cause in self.causes if cause.blocks)


def build_view(record: RunRecord) -> ReportView:
    """Return everything that the formats show of this record."""
    required = set(record.required)
    phases = tuple(
        _phase_view(index, phase, required) for index, phase in enumerate(record.phases, start=1)
    )
    rows = tuple(row for phase in phases for row in phase.rows)
    acceptance = tuple(
        row for wanted in dict.fromkeys(record.required) for row in _acceptance_rows(wanted, rows)
    )
    missing = tuple(row for row in acceptance if row not in rows)
    problems = sorted((row for row in (*rows, *missing) if row.is_problem), key=_urgency)
    causes = causes_of(record, problems)
    return ReportView(
        record=record,
        headline=one_line(record.headline),
        counts=_count(rows, "check"),
        required_counts=_count(acceptance, "required check"),
        interruption=_interruption(record),
        phases=phases,
        rows=rows,
        acceptance=acceptance,
        missing=missing,
        problems=tuple(problems),
        causes=causes,
        following=following(record, causes),
        left_out=record.left_out(),
    )


def _phase_view(index: int, phase: PhaseRecord, required: set[str]) -> PhaseView:
    rows = tuple(
        check if check.required else check.model_copy(update={"required": check.id in required})
        for check in phase.checks
    )
    return PhaseView(index=index, record=phase, rows=rows)


def _acceptance_rows(wanted: str, rows: tuple[Check, ...]) -> list[Check]:
    return [row for row in rows if row.id == wanted] or [_missing(wanted)]


def _missing(wanted: str) -> Check:
    """What stands for a required id, whatever it is, that no check of the run has."""
    return Check.model_construct(
        id=wanted,
        phase=wanted.partition(".")[0],
        question="Required by the profile.",
        outcome=Outcome.INCOMPLETE,
        code=Reason.NOT_RUN,
        reason="missing: the run has no check with this id",
        required=True,
        remedy="run the phase that gives this check, then judge again",
    )


def _urgency(row: Check) -> tuple[bool, int]:
    return (not row.required, Outcome(row.outcome).rank)


def _count(rows: tuple[Check, ...], noun: str) -> str:
    """`12 checks: 10 PASS, 1 FAIL, 1 SKIPPED`: a skip is counted as a skip."""
    counted = Counter(row.outcome for row in rows)
    order = (Outcome.PASS, *(one for one in WORST_FIRST if one is not Outcome.PASS))
    parts = [f"{counted[name]} {name}" for name in order if counted[name]]
    total = how_many(len(rows), noun)
    return f"{total}: {', '.join(parts)}" if parts else total


def _interruption(record: RunRecord) -> str:
    if record.interrupted:
        return "Interrupted: this run was stopped early. What did not run has no evidence."
    if record.finished_at is None:
        return "Unfinished: this run has not completed, or the program that ran it died."
    return ""
