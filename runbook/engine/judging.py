"""One phase judged from what lies in the run's folder; live and afterwards by the same code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phases.base import Judgement, Phase, PlanContext
from runbook.engine.verdict import missing_row, phase_outcome
from runbook.evidence import Fact, PhaseEvidence
from runbook.files import write_atomic
from runbook.read import read_launch
from runbook.records import (
    Check,
    LaunchEntry,
    Outcome,
    PhaseRecord,
    Reason,
)

__all__ = ["FACTS_FILE", "judge_phase", "read_facts", "read_phase", "record_of", "write_facts"]

FACTS_FILE = "facts.json"


def write_facts(run_root: Path, facts: Mapping[str, Fact]) -> None:
    """Keep what was found out about the machine, for judging again."""
    document = {
        name: {
            "name": fact.name,
            "value": fact.value,
            "unit": fact.unit,
            "path": fact.path,
            "sha256": fact.sha256,
            "note": fact.note,
        }
        for name, fact in facts.items()
    }
    write_atomic(run_root / FACTS_FILE, json.dumps(document, indent=2) + "\n")


def read_facts(run_root: Path) -> dict[str, Fact]:
    """The facts of a run; none if preflight did not run. Raises `ValueError` if damaged."""
    path = run_root / FACTS_FILE
    if not path.is_file():
        return {}
    document: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return {name: Fact(**fields) for name, fields in document.items()}


def read_phase(
    run_root: Path,
    entries: Sequence[LaunchEntry],
    *,
    facts: Mapping[str, Fact],
    earlier: Mapping[str, PhaseEvidence],
) -> PhaseEvidence:
    """Everything that the launches of a phase left behind."""
    launches = {
        entry.launch.name: read_launch(run_root, entry.launch, entry.result) for entry in entries
    }
    return PhaseEvidence(launches=launches, facts=facts, earlier=earlier)


def judge_phase(
    phase: Phase, evidence: PhaseEvidence, context: PlanContext, *, required: Sequence[str]
) -> Judgement:
    """The phase's judgement, with a row for every check that it declares.

    The phase itself decides everything; here a row that it forgot becomes INCOMPLETE, and the
    profile's list says which rows are required.
    """
    judgement = phase.judge(evidence, context)
    wanted = set(required)
    checks = [
        check.model_copy(update={"required": check.id in wanted}) for check in judgement.checks
    ]
    present = {check.id for check in checks}
    checks += [
        missing_row(
            name,
            code=Reason.HARNESS_ERROR,
            reason="the phase was judged without this row",
            remedy="report this as a defect of the runbook",
            required=name in wanted,
        )
        for name in phase.check_ids(context)
        if name not in present
    ]
    return Judgement(
        checks=checks,
        measurements=judgement.measurements,
        tables=judgement.tables,
        series=judgement.series,
        choices=judgement.choices,
        notes=judgement.notes,
    )


def record_of(
    phase: Phase,
    judgement: Judgement,
    entries: Sequence[LaunchEntry],
    *,
    started_at: str,
    duration_s: float,
) -> PhaseRecord:
    """A judged phase for the record."""
    checks: tuple[Check, ...] = tuple(judgement.checks)
    return PhaseRecord(
        name=phase.name,
        title=phase.title,
        source=phase.source,
        outcome=phase_outcome(checks) if checks else Outcome.INCOMPLETE,
        optional=phase.optional,
        started_at=started_at,
        duration_s=round(duration_s, 3),
        launches=tuple(entries),
        measurements=tuple(judgement.measurements),
        checks=checks,
        tables=tuple(judgement.tables),
        series=tuple(judgement.series),
        choices=dict(judgement.choices),
        notes=tuple(judgement.notes),
    )
