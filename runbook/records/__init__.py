"""The records that a run leaves behind; `run.json` is one `RunRecord`."""

from __future__ import annotations

from runbook.records.launch import (
    ArmSchedule,
    Begun,
    Kind,
    Launch,
    LaunchResult,
    LaunchStatus,
    RankExit,
    Stop,
    Stopped,
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
    satisfies,
)
from runbook.records.run import (
    ArtifactRecord,
    LaunchEntry,
    PhaseRecord,
    RunRecord,
)
from runbook.records.shown import Compared, Comparison, Mark, Series, Span, Table, thin_points

__all__ = [
    "THE_RUN",
    "ArmSchedule",
    "ArtifactRecord",
    "Begun",
    "Check",
    "Comparator",
    "Compared",
    "Comparison",
    "Kind",
    "Launch",
    "LaunchEntry",
    "LaunchResult",
    "LaunchStatus",
    "Mark",
    "Measurement",
    "Outcome",
    "PhaseRecord",
    "RankExit",
    "Reason",
    "RunRecord",
    "Series",
    "Span",
    "Stop",
    "Stopped",
    "Table",
    "Verdict",
    "Window",
    "judge_run",
    "satisfies",
    "thin_points",
]
