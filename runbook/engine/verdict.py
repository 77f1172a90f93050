"""From checks to the outcome of a phase and the verdict of a run, with the reasons first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from runbook.records import Check, Outcome, PhaseRecord, Reason, Verdict, judge_run

__all__ = ["missing_phases", "missing_row", "phase_outcome", "reasons_for"]

# What outranks what where several checks are summed up.
_ORDER = (
    Outcome.FAIL,
    Outcome.INVALID,
    Outcome.INCOMPLETE,
    Outcome.INCONCLUSIVE,
    Outcome.PASS,
    Outcome.SKIPPED,
)
_SHOWN = 2


def phase_outcome(checks: Iterable[Check]) -> Outcome:
    """The worst outcome of a phase's checks; SKIPPED only if all are; none at all: INCOMPLETE."""
    outcomes = {check.outcome for check in checks}
    return next((outcome for outcome in _ORDER if outcome in outcomes), Outcome.INCOMPLETE)


def missing_row(
    name: str, *, code: Reason, reason: str, remedy: str, rerun: str = "", required: bool = True
) -> Check:
    """The row of a check that has no evidence."""
    return Check(
        id=name,
        phase=name.partition(".")[0],
        question="(no evidence)",
        outcome=Outcome.INCOMPLETE,
        code=code,
        reason=reason,
        remedy=remedy,
        rerun=rerun,
        required=required,
    )


def missing_phases(
    phases: Sequence[PhaseRecord],
    required: Iterable[str],
    *,
    known: Mapping[str, tuple[str, str]],
    asked_for: Sequence[str],
    interrupted: str,
    profile: str,
) -> list[PhaseRecord]:
    """Records of the phases that have required checks and never ran, each check a row.

    `known` gives title and source of a phase by name. `interrupted` is the signal, if there was
    one. The result keeps the order of `required`.
    """
    present = {check.id for phase in phases for check in phase.checks}
    absent: dict[str, list[str]] = {}
    for name in required:
        if name not in present:
            absent.setdefault(name.partition(".")[0], []).append(name)
    ran = {phase.name: phase for phase in phases}
    records = []
    for phase, names in absent.items():
        code, reason = _why(phase, ran, asked_for, interrupted)
        rerun = f"runbook run --phase {phase} --profile {profile}"
        rows = tuple(
            missing_row(
                name,
                code=code,
                reason=reason,
                remedy="run this phase, or continue the run with --resume",
                rerun=rerun,
            )
            for name in names
        )
        title, source = known.get(phase, (phase, "the profile"))
        records.append(
            PhaseRecord(
                name=phase, title=title, source=source, outcome=Outcome.INCOMPLETE, checks=rows
            )
        )
    return records


def _why(
    phase: str, ran: Mapping[str, PhaseRecord], asked_for: Sequence[str], interrupted: str
) -> tuple[Reason, str]:
    if phase in ran:
        return Reason.HARNESS_ERROR, "the phase ended without this row"
    if phase not in asked_for:
        return Reason.NOT_RUN, "this phase was not asked for"
    if interrupted:
        return Reason.INTERRUPTED, f"the run was interrupted by {interrupted} before this phase"
    return Reason.NOT_RUN, "the run has not come to this phase"


def reasons_for(
    checks: Sequence[Check], required: Sequence[str], *, interrupted: str = ""
) -> tuple[str, ...]:
    """One or two sentences that say why the verdict is what it is."""
    verdict = judge_run(checks, required)
    if verdict is Verdict.GO:
        return (f"all {len(set(required))} required checks passed",)
    bad = [check for check in checks if check.id in set(required) and check.outcome != Outcome.PASS]
    bad.sort(key=lambda check: _ORDER.index(check.outcome))
    if verdict is Verdict.NO_GO:
        bad = [check for check in bad if check.outcome is Outcome.FAIL]
    texts = [f"interrupted by {interrupted}"] if interrupted else []
    room = _SHOWN - len(texts)
    texts += [f"{check.id} is {check.outcome}: {check.reason}" for check in bad[:room]]
    more = len(bad) - room
    if more > 0:
        texts[-1] += f" (and {more} more)"
    return tuple(texts) or ("the profile requires no check",)
