"""The phases of a finished run, read and judged again from its folder alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from phases.base import Phase
from runbook.engine.judging import judge_phase, read_facts, read_phase, record_of
from runbook.engine.options import Setup
from runbook.evidence import PhaseEvidence
from runbook.records import PhaseRecord, Reason, RunRecord

__all__ = ["rejudge"]

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
        chosen: dict[str, str] = {}
        for name in phase.reads:
            chosen |= choices.get(name, {})
        found = read_phase(
            run_root,
            old.launches,
            facts=facts,
            earlier={name: evidence[name] for name in phase.reads if name in evidence},
        )
        context = setup.context(chosen)
        judgement = judge_phase(phase, found, context, required=setup.profile.required)
        if _is_read_later(phase.name, phases.values()):
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


def _is_read_later(name: str, phases: Iterable[Phase]) -> bool:
    return any(name in phase.reads for phase in phases)
