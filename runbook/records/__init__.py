"""The records that a run leaves behind; `run.json` is one `RunRecord`."""

from __future__ import annotations

from runbook.records.launch import ArmSchedule, Launch, LaunchResult, LaunchStatus, RankExit
from runbook.records.measurement import Measurement, Source, Window
from runbook.records.outcome import Check, Comparator, Outcome, Reason, Verdict, judge_run
from runbook.records.run import (
    SCHEMA_VERSION,
    ArtifactRecord,
    LaunchEntry,
    PhaseRecord,
    RunRecord,
    Series,
    Table,
    thin_points,
)

__all__ = [
    "SCHEMA_VERSION",
    "ArmSchedule",
    "ArtifactRecord",
    "Check",
    "Comparator",
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
    "Source",
    "Table",
    "Verdict",
    "Window",
    "judge_run",
    "thin_points",
]
