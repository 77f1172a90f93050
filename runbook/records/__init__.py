"""The records that a run leaves behind; `run.json` is one `RunRecord`."""

from __future__ import annotations

from runbook.records.launch import (
    ArmSchedule,
    Kind,
    Launch,
    LaunchResult,
    LaunchStatus,
    RankExit,
)
from runbook.records.measurement import Measurement, Window
from runbook.records.outcome import (
    THE_RUN,
    Check,
    Comparator,
    Outcome,
    Reason,
    Verdict,
    judge_run,
)
from runbook.records.run import (
    ArtifactRecord,
    LaunchEntry,
    PhaseRecord,
    RunRecord,
    Series,
    Table,
    thin_points,
)

__all__ = [
    "THE_RUN",
    "ArmSchedule",
    "ArtifactRecord",
    "Check",
    "Comparator",
    "Kind",
    "Launch",
    "LaunchEntry",
    "LaunchResult",
    "LaunchStatus",
    "Measurement",
    "Outcome",
    "PhaseRecord",
    "RankExit",
    "Reason",
    "RunRecord",
    "Series",
    "Table",
    "Verdict",
    "Window",
    "judge_run",
    "thin_points",
]
