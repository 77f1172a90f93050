"""Judge a hand-written table of results by the rules of a run."""

from __future__ import annotations

from runbook.tools.replay.judge import ReplayRecord, judge_replay
from runbook.tools.replay.models import ReplayFile, load_replay, replay_names
from runbook.tools.replay.rules_rows import RULES, Contradiction

__all__ = [
    "RULES",
    "Contradiction",
    "ReplayFile",
    "ReplayRecord",
    "judge_replay",
    "load_replay",
    "replay_names",
]
