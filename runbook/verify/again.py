"""`judge_again`: a finished run under other limits, without starting anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from phases.base import Phase
from runbook.engine.derive import assemble
from runbook.engine.options import setup_of_record
from runbook.records import PhaseRecord, RunRecord
from runbook.verify.rejudge import rejudge

if TYPE_CHECKING:
    from runbook.config import Profile

__all__ = ["judge_again"]


def judge_again(
    record: RunRecord,
    run_root: Path,
    profile: Profile,
    *,
    phases: Mapping[str, Phase] | None = None,
) -> RunRecord:
    """The record that this run would have under `profile`; nothing is written.

    Launches, facts and settings stay what they were: a profile that would have planned other
    launches gets rows without evidence, never numbers of another plan. Raises `ValueError` and
    `OSError` as the readers do.
    """
    if phases is None:
        from phases.registry import PHASES

        phases = PHASES
    setup = setup_of_record(record, profile=profile)
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
        }
    )
    return assemble(
        changed,
        judged,
        asked_for=[phase.name for phase in setup.phases],
        known={name: (phase.title, phase.source) for name, phase in phases.items()},
    )
