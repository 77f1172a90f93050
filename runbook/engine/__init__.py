"""The engine: runs a plan and leaves a record. Never imports torch.

Here: one phase judged from what lies in the run's folder; live and afterwards by the same code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runbook.config.registry import Judgement, Phase, PlanContext
from runbook.config.setup import Setup
from runbook.engine.scope import what_ran
from runbook.folder.facts import read_accepted
from runbook.folder.launch.evidence import read_launch
from runbook.records import (
    THE_RUN,
    Check,
    LaunchEntry,
    Outcome,
    PhaseRecord,
    Reason,
    RunRecord,
    Verdict,
    judge_run,
    satisfies,
)
from runbook.records.evidence import Fact, PhaseEvidence
from runbook.records.run import Ran

_SHOWN = 2
_WITHOUT_JUDGEMENT = (Reason.INTERRUPTED, Reason.HARNESS_ERROR)


def phase_outcome(checks: Iterable[Check]) -> Outcome:
    """The worst outcome of a phase's checks; SKIPPED only if all are; none at all: INCOMPLETE."""
    outcomes = {check.outcome for check in checks}
    # A skipped check says nothing about a phase in which others were answered.
    answered = outcomes - {Outcome.SKIPPED} or outcomes
    return min(answered, key=lambda outcome: outcome.rank, default=Outcome.INCOMPLETE)


def missing_rows(names: Iterable[str], required: Collection[str], **said: Any) -> list[Check]:
    """The rows of checks that have no evidence; `said` are fields of them, those of `Check`."""
    row = {"question": "(no evidence)", "outcome": Outcome.INCOMPLETE, **said}
    return [
        Check(id=name, phase=name.partition(".")[0], required=name in required, **row)
        for name in names
    ]


def missing_phases(
    record: RunRecord,
    phases: Sequence[PhaseRecord],
    *,
    known: Mapping[str, tuple[str, str]],
    asked_for: Sequence[str],
) -> list[PhaseRecord]:
    """Records of the phases that have required checks and never ran, each check a row.

    `known` gives title and source of a phase by name. The result keeps the order of `required`.
    """
    present = {check.id for phase in phases for check in phase.checks}
    absent: dict[str, list[str]] = {}
    for name in record.required:
        if name not in present:
            absent.setdefault(name.partition(".")[0], []).append(name)
    ran = {phase.name for phase in phases}
    records = []
    for phase, names in absent.items():
        code, reason, follows = Reason.NOT_RUN, "the run has not come to this phase", THE_RUN
        if phase in ran:
            code, reason, follows = Reason.HARNESS_ERROR, "the phase ended without this row", ""
        elif phase not in asked_for:
            code, reason, follows = Reason.NOT_ASKED_FOR, "this phase was not asked for", phase
        elif signal := record.options.get("signal"):
            code = Reason.INTERRUPTED
            reason = f"the run was interrupted by {signal} before this phase"
        left_out = code is Reason.NOT_ASKED_FOR
        said = {
            "outcome": Outcome.SKIPPED if left_out else Outcome.INCOMPLETE,
            "code": code,
            "reason": reason,
            "remedy": "" if left_out else "run this phase, or continue the run with --resume",
            "rerun": record.invocation.line([phase]),
            "follows": follows,
        }
        rows = tuple(missing_rows(names, record.required, **said))
        title, source = known.get(phase, (phase, "the profile"))
        records.append(
            PhaseRecord(
                name=phase, title=title, source=source, outcome=phase_outcome(rows), checks=rows
            )
        )
    return records


def reasons_for(
    checks: Sequence[Check], required: Sequence[str], *, interrupted: str = ""
) -> tuple[str, ...]:
    """One or two sentences that say why the verdict is what it is."""
    verdict, wanted = judge_run(checks, required), set(required)
    chosen = [check for check in checks if check.id in wanted]
    left_out = [check for check in chosen if check.left_out]
    if verdict is Verdict.GO:
        passed = sum(check.outcome is Outcome.PASS for check in chosen)
        new = len(chosen) - passed
        rest = f"; {new} had no accepted run to compare with" if new else ""
        return (f"all {passed} required checks passed{rest}",)
    if verdict is Verdict.PARTIAL:
        phases = ", ".join(dict.fromkeys(check.phase for check in left_out))
        passed_all = f"all {len(wanted) - len(left_out)} required checks that were asked for passed"
        return (passed_all, f"{len(left_out)} more were not asked for: {phases}")
    bad = [check for check in chosen if not satisfies(check) and not check.left_out]
    bad.sort(key=lambda check: check.outcome.rank)
    if verdict is Verdict.NO_GO:
        bad = [check for check in bad if check.outcome is Outcome.FAIL]
    told = _told_once(bad, checks)
    texts = [f"interrupted by {interrupted}"] if interrupted else []
    room = _SHOWN - len(texts)
    texts += told[:room]
    more = len(told) - room
    if more > 0:
        texts[-1] += f" (and {more} more)"
    return tuple(texts) or ("the profile requires no check",)


def _told_once(bad: Sequence[Check], checks: Sequence[Check]) -> list[str]:
    """Each check in words; one that fails because of another follows that one, as its effect."""
    by_id = {check.id: check for check in checks if not satisfies(check)}
    effects: dict[str, list[str]] = {}
    for check in bad:
        root, seen = check, {check.id}
        while check.outcome is Outcome.FAIL and root.follows in by_id and root.follows not in seen:
            root = by_id[root.follows]
            seen.add(root.id)
        others = effects.setdefault(root.id, [])
        if root is not check:
            others.append(f"{check.id} is {check.outcome}")
    texts = []
    for name, others in effects.items():
        so = f"; so {', '.join(others)}" if others else ""
        texts.append(f"{name} is {by_id[name].outcome}: {by_id[name].reason}{so}")
    return texts


@dataclass(kw_only=True)
class RunInFolder:
    """A run as it lies in its folder: what its phases are planned and judged from.

    `evidence` and `choices` are of the phases that ran, by name.
    """

    setup: Setup
    run_root: Path
    facts: dict[str, Fact] = field(default_factory=dict)
    evidence: dict[str, PhaseEvidence] = field(default_factory=dict)
    choices: dict[str, dict[str, str]] = field(default_factory=dict)

    def context(self, phase: Phase) -> PlanContext:
        """What the phase plans and judges with, given what those that it reads chose."""
        chosen: dict[str, str] = {}
        for name in phase.reads:
            chosen |= self.choices.get(name, {})
        return self.setup.context(chosen)

    def read(self, phase: Phase, entries: Sequence[LaunchEntry]) -> PhaseEvidence:
        """Everything that these launches of the phase left behind, and what it keeps and reads."""
        return PhaseEvidence(
            launches={
                entry.launch.name: read_launch(self.run_root, entry.launch, entry.result)
                for entry in entries
            },
            facts=self.facts,
            earlier={name: self.evidence[name] for name in phase.reads if name in self.evidence},
            accepted=read_accepted(self.run_root, phase.name),
        )

    def judged(self, phase: Phase, evidence: PhaseEvidence) -> Judgement:
        """The phase's judgement, with a row for every check that it declares.

        The phase itself decides everything; here a row that it forgot becomes INCOMPLETE, and the
        profile's list says which rows are required.
        """
        context, wanted = self.context(phase), set(self.setup.required)
        judgement = phase.judge(evidence, context)
        checks = [
            check.model_copy(update={"required": check.id in wanted}) for check in judgement.checks
        ]
        present = {check.id for check in checks}
        checks += missing_rows(
            [name for name in phase.check_ids(context) if name not in present],
            wanted,
            code=Reason.HARNESS_ERROR,
            reason="the phase was judged without this row",
            remedy="report this as a defect of the runbook",
        )
        return replace(judgement, checks=checks)

    def judged_again(self, phase: Phase, before: PhaseRecord) -> PhaseRecord:
        """A finished phase judged from its files; when and how often it ran stays as it was."""
        evidence = self.evidence[phase.name] = self.read(phase, before.launches)
        record = record_of(
            phase,
            self.judged(phase, evidence),
            before.launches,
            started_at=before.started_at,
            duration_s=before.duration_s,
            ran=what_ran(evidence),
        )
        return record.model_copy(update={"repeated": before.repeated})


def was_judged(record: PhaseRecord) -> bool:
    """Has the phase a judgement of its own, so that it can be judged again?"""
    if not record.started_at or not record.checks:
        return False
    return not all(check.code in _WITHOUT_JUDGEMENT for check in record.checks)


def is_as_planned(phase: Phase, context: PlanContext, record: PhaseRecord) -> bool:
    """Are its launches those that the phase plans here?"""
    ran = [entry.launch for entry in record.launches]
    # Conditional launches run only where the first ones did not decide.
    return [one for one in phase.plan(context) if not one.conditional or one in ran] == ran


def record_of(
    phase: Phase,
    judgement: Judgement,
    entries: Sequence[LaunchEntry],
    *,
    started_at: str,
    duration_s: float,
    ran: Sequence[Ran] = (),
) -> PhaseRecord:
    """A judged phase for the record."""
    return PhaseRecord(
        name=phase.name,
        title=phase.title,
        source=phase.source,
        outcome=phase_outcome(judgement.checks),
        optional=phase.optional,
        started_at=started_at,
        duration_s=round(duration_s, 3),
        launches=tuple(entries),
        ran=tuple(ran),
        **vars(judgement),
    )
