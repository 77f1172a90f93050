"""Judge a hand-written table of results by the rules of a run."""

from __future__ import annotations

from runbook.replay.contradiction import RULES, Contradiction
from runbook.replay.judge import Judgement, judge_replay
from runbook.replay.load import load_replay, replay_names
from runbook.replay.models import ReplayFile

__all__ = [
    "RULES",
    "Contradiction",
    "Judgement",
    "ReplayFile",
    "judge_replay",
    "load_replay",
    "replay_names",
]
