"""`judge_again`: a finished run under other limits, without starting anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from runbook import registry
from runbook.engine.journal import assemble
from runbook.engine.judge import judge_phase, read_facts, read_phase, record_of, what_it_reads
from runbook.engine.options import Setup, setup_of_record
from runbook.records import PhaseRecord, Reason, RunRecord
from runbook.records.evidence import PhaseEvidence
from runbook.records.phase import Phase

if TYPE_CHECKING:
    from runbook.config import Profile


_WITHOUT_JUDGEMENT = (Reason.INTERRUPTED, Reason.HARNESS_ERROR)


def rejudge(
    record: RunRecord, run_root: Path, setup: Setup, *, phases: Mapping[str, Phase]
) -> Iterator[tuple[PhaseRecord, PhaseRecord]]:
    """Pairs of a phase as recorded and as judged now, for every phase that was judged at all.

    A phase that never ran, was cut off before its judgement, or in which the runbook itself
    failed has nothing to judge again and is passed through unchanged. Raises `ValueError` for
    facts that cannot be read, `OSError` for an unreadable disk.
    """
    facts = read_facts(run_root)
    evidence: dict[str, PhaseEvidence] = {}
    choices: dict[str, dict[str, str]] = {}
    for old in record.phases:
        phase = phases.get(old.name)
        if phase is None or not _was_judged(old):
            yield old, old
            continue
        chosen, earlier = what_it_reads(phase, choices, evidence)
        found = read_phase(run_root, old.launches, facts=facts, earlier=earlier)
        context = setup.context(chosen)
        judgement = judge_phase(phase, found, context, required=setup.profile.required)
        if any(phase.name in later.reads for later in phases.values()):
            evidence[phase.name] = found
        new = record_of(
            phase,
            judgement,
            old.launches,
            started_at=old.started_at,
            duration_s=old.duration_s,
        )
        choices[old.name] = new.choices
        yield old, new


def _was_judged(record: PhaseRecord) -> bool:
    if not record.started_at or not record.checks:
        return False
    return not all(check.code in _WITHOUT_JUDGEMENT for check in record.checks)


def judge_again(
    record: RunRecord,
    run_root: Path,
    profile: Profile,
    *,
    named: str = "",
    phases: Mapping[str, Phase] | None = None,
) -> RunRecord:
    """The record that this run would have under `profile`; nothing is written.

    `named` is how the reader names the profile, for the commands that are printed.

    Launches, facts and settings stay what they were: a profile that would have planned other
    launches gets rows without evidence, never numbers of another plan. Raises `ValueError` and
    `OSError` as the readers do.
    """
    if phases is None:
        phases = registry.phases()
    setup = setup_of_record(record, profile=profile, named=named)
    ran = [phase for phase in record.phases if phase.started_at]
    kept = record.model_copy(update={"phases": tuple(ran)})
    judged: list[PhaseRecord] = [new for _, new in rejudge(kept, run_root, setup, phases=phases)]
    toggles = setup.settings.toggles
    exports = {name: value.value for name, value in profile.env.items()} | dict(toggles)
    changed = record.model_copy(
        update={
            "profile": profile.name,
            "profile_sha256": setup.profile_sha256(),
            "profile_document": setup.profile_document(),
            "scope": profile.scope,
            "required": profile.required,
            "exports": exports,
            "options": {**record.options, "profile": setup.options.invocation().profile},
        }
    )
    return assemble(
        changed,
        judged,
        asked_for=[phase.name for phase in setup.phases],
        known={name: (phase.title, phase.source) for name, phase in phases.items()},
    )
