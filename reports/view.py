"""What every format shows, worked out once: rows, problems and counts of a run record.

Nothing is judged here: outcomes are the record's own. The one thing added is a row for each
required id that the record lacks, because a missing row must never look like a good one. What a
verdict permits, and what to type after it, is one answer for every page and the terminal.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reports.causes import Cause, causes_of, without
from reports.text import one_line
from runbook.engine.starting import left_open
from runbook.errors import how_many, listed, short_caveat
from runbook.files import shipped_data
from runbook.records import Check, Outcome, PhaseRecord, Reason, RunRecord, Verdict
from runbook.records.run import Step

_SHORT_COMMIT = 7
# What a line with the first of them begins with, and one with the second.
STEPS = ("next", "then")


@dataclass(frozen=True, kw_only=True)
class Permit:
    """`says`: what the reader may do. The others belong to a GO, and are empty otherwise.

    `qualified`: what its caveats mean for production. `valid_for`: what it holds for.
    """

    says: str
    qualified: str = ""
    valid_for: str = ""


def permit_of(record: RunRecord) -> Permit:
    """What this run permits."""
    if record.verdict is Verdict.NO_GO:
        return Permit(says="Do not start the production run.")
    if record.verdict is Verdict.PARTIAL:
        return Permit(says="This is no GO yet: other required checks have not run.")
    if record.verdict is Verdict.INCOMPLETE and record.interrupted and record.options.get("plan"):
        return Permit(says="Stopped before its end: nothing is decided, and it can go on.")
    if record.verdict is Verdict.INCOMPLETE:
        other = [e for p in record.phases for e in p.launches if e.launch.own and e.result.ok]
        trained = other or any(phase.ran for phase in record.phases)
        why = "required evidence is missing" if trained else "nothing could be measured"
        return Permit(says=f"Not approved: {why}. Do not start the production run.")
    if record.options.get("plan"):
        return Permit(says="Every phase of this launch passed its gate.", valid_for=_valid(record))
    return Permit(says=_approved(record), qualified=_qualified(record), valid_for=_valid(record))


def _approved(record: RunRecord) -> str:
    """What a GO of this machine permits and what it does not."""
    floor = any(name.endswith(".throughput") for name in record.required)
    judged = bool(record.profile_document.get("throughput_gated", True)) and floor
    speed = "" if judged else "Speed was not judged. "
    if record.of_profile("hardware").get("device") == "cpu":
        return f"The code works on this CPU. {speed}This approves no run on GPUs."
    may = "The production run may start on this machine with this configuration."
    return f"{speed}{may}"


def _qualified(record: RunRecord) -> str:
    """A launch behind a GO that had caveats is started, and says them again (`runbook launch`).

    It starts no trainer of one's own, which always has the caveat of what was not checked.
    """
    if not record.caveats:
        return ""
    told = ", ".join(map(short_caveat, record.caveats))
    if record.of_own_trainer:
        return "A qualified GO: a trainer of your own never gets another one."
    return (
        f"A qualified GO: {told}. runbook launch with the same profile and settings starts "
        "behind it and repeats this in its own verdict; a run without it gives an unqualified GO."
    )


def _valid(record: RunRecord) -> str:
    known = record.environment
    commit = known.get("git.sha", "")[:_SHORT_COMMIT]
    changed = " with changes that are not committed" if known.get("git.dirty") == "True" else ""
    parts = [f"commit {commit}{changed}"] if commit else []
    return ", ".join([*parts, "this machine", f"profile {record.profile}"])


def run_folder(record: RunRecord) -> str:
    """The run's folder as a word of a command: where the run was told to put it."""
    out = record.invocation.out
    return shlex.quote(f"{out}/{record.run_id}")


def following(record: RunRecord, causes: Sequence[Cause]) -> tuple[Step, ...]:
    """The next command, and the one after it; none where nothing is left to type.

    A run that was cut off goes on first. Of a run that is not GO, the command of its first cause,
    then what leads to a verdict once that passes.
    """
    invocation = record.invocation
    if record.interrupted or record.finished_at is None:
        resume = invocation.resume_line(record.run_id)
        return (Step(command=resume, does="go on where it was cut off"),)
    if record.verdict is Verdict.GO:
        return _behind_a_go(record)
    if record.verdict is Verdict.PARTIAL:
        missing = list(dict.fromkeys(name.partition(".")[0] for name in record.left_out()))
        add = invocation.resume_line(record.run_id, missing)
        return (Step(command=add, does="add what was not asked for"),) if missing else ()
    return tuple(_blocked(record, causes))


def _behind_a_go(record: RunRecord) -> tuple[Step, ...]:
    """The production run, or the check of a GO of a trainer of one's own, which a person starts."""
    if record.options.get("plan"):
        return ()
    command, does = record.invocation.production_line(), "train behind this GO, by a plan"
    if record.of_own_trainer:
        command = f"runbook verify {run_folder(record)}"
        does = "check every number of it, then start your trainer as you do"
    return (Step(command=command, does=does),)


def _blocked(record: RunRecord, causes: Sequence[Cause]) -> Iterator[Step]:
    first = next((cause for cause in causes if cause.blocks), None)
    invocation = record.invocation
    if first is None:
        if record.verdict is Verdict.INCOMPLETE:  # only its own files could not be written
            does = "go on, once there is room for its files"
            yield Step(command=invocation.resume_line(record.run_id), does=does)
        return
    advice = first.advice
    when = "when this passes" if advice.command else ""
    if advice.command:
        yield Step(command=advice.command, does=f"for {first.lead.id}")
    line, does = invocation.line(), "run all phases: a GO needs every required check"
    if advice.left_out:
        line = without(line, advice.left_out)
    elif record.options.get("plan"):
        if left_open(record):
            line, does = invocation.resume_line(record.run_id), "go on with this launch"
    elif record.verdict is Verdict.INCOMPLETE and _worth_keeping(record):
        line, does = invocation.resume_line(record.run_id), "run again here what did not pass"
    yield Step(command=line, when=when, does=does)


def _worth_keeping(record: RunRecord) -> bool:
    """Has a phase trained and passed? A machine that preflight refused may be another one then."""
    return any(phase.ran and phase.outcome is Outcome.PASS for phase in record.phases)


# As a reader needs them who sees them for the first time.
_MEANINGS: dict[str, str] = shipped_data("report/words")["meanings"]


@dataclass(frozen=True, kw_only=True)
class ReportView:
    """A whole run, ready to be shown."""

    record: RunRecord
    headline: str
    required_counts: str
    interruption: str
    phases: tuple[PhaseRecord, ...]
    rows: tuple[Check, ...]
    acceptance: tuple[Check, ...]
    missing: tuple[Check, ...]
    problems: tuple[Check, ...]
    causes: tuple[Cause, ...]
    following: tuple[Step, ...]

    @property
    def own_reasons(self) -> tuple[str, ...]:
        """The reasons that no cause tells."""
        told = tuple(f"{row.id} is " for row in self.problems)
        return tuple(text for text in self.record.reasons if not text.startswith(told))

    @property
    def tally(self) -> str:
        """How many causes there are, how the checks came out, and which of those that passed warn.

        A GO tells its required ones elsewhere.
        """
        go = self.record.verdict is Verdict.GO
        causes = [how_many(len(self.causes), "cause")] if self.causes else []
        warn = [row.id for row in self.rows if row.code == Reason.WARNING]
        told = [*causes, *([] if go else [self.required_counts]), _count(self.rows, "check")]
        return "; ".join([*told, *([f"{len(warn)} warn: {listed(warn)}"] if warn else [])])

    @property
    def words(self) -> str:
        """What the outcomes mean that are on the page; the counts show which those are."""
        shown = {row.outcome for row in (*self.rows, *self.acceptance)}
        told = [f"{name}: {text}" for name, text in _MEANINGS.items() if name in shown]
        return f"{'; '.join(told)}." if told else ""

    @property
    def untold(self) -> tuple[Step, ...]:
        """The steps that no cause tells, nor the verdict of a run that was cut off."""
        steps = () if self.interruption else self.following
        return tuple(step for step in steps if step.command not in self.told)

    @property
    def told(self) -> frozenset[str]:
        """The commands that stand beside the causes that keep the run from GO."""
        return frozenset(cause.advice.command for cause in self.causes if cause.blocks)


def build_view(record: RunRecord) -> ReportView:
    """Return everything that the formats show of this record."""
    required = set(record.required)
    phases = tuple(_marked(phase, required) for phase in record.phases)
    rows = tuple(row for phase in phases for row in phase.checks)
    acceptance = tuple(
        row for wanted in dict.fromkeys(record.required) for row in _acceptance_rows(wanted, rows)
    )
    missing = tuple(row for row in acceptance if row not in rows)
    problems = sorted(
        (row for row in (*rows, *missing) if row.is_problem),
        key=lambda row: (not row.required, row.outcome.rank),
    )
    causes = causes_of(record, problems)
    return ReportView(
        record=record,
        headline=one_line(record.headline),
        required_counts=_count(acceptance, "required check"),
        interruption=_interruption(record),
        phases=phases,
        rows=rows,
        acceptance=acceptance,
        missing=missing,
        problems=tuple(problems),
        causes=causes,
        following=following(record, causes),
    )


def _marked(phase: PhaseRecord, required: set[str]) -> PhaseRecord:
    """The phase, whose checks know that they are required."""
    checks = tuple(
        check if check.required else check.model_copy(update={"required": check.id in required})
        for check in phase.checks
    )
    return phase.model_copy(update={"checks": checks})


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


def _count(rows: tuple[Check, ...], noun: str) -> str:
    """`12 checks: 10 PASS, 1 FAIL, 1 SKIPPED`: a skip is counted as a skip."""
    counted = Counter(row.outcome for row in rows)
    order = (Outcome.PASS, *(one for one in Outcome if one is not Outcome.PASS))
    parts = [f"{counted[name]} {name}" for name in order if counted[name]]
    total = how_many(len(rows), noun)
    return f"{total}: {', '.join(parts)}" if parts else total


def _interruption(record: RunRecord) -> str:
    if record.interrupted:
        return "Interrupted: this run was stopped early. What did not run has no evidence."
    if record.finished_at is None:
        return "Unfinished: this run has not completed, or the program that ran it died."
    return ""
