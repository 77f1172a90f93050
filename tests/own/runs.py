"""Launches of trainers that are not ours, judged by one phase."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from runbook.config import Profile, registry
from runbook.config.load import load_profile
from runbook.config.registry import PlanContext
from runbook.folder.launch.evidence import read_launch
from runbook.launch import run_launch
from runbook.launch.observer import Observer
from runbook.launch.supervision import LaunchOptions
from runbook.records import Check
from runbook.records.evidence import LaunchEvidence, PhaseEvidence

TRAINERS = Path(__file__).parent / "trainers"
COUNTING = TRAINERS / "counting.py"
LOG: dict[str, Any] = {
    "path": "{out}/metrics.csv",
    "columns": {"loss": "train/loss", "step": "global_step", "dt_s": "dt"},
}


def document(fault: str = "none", **changed: Any) -> dict[str, Any]:
    """A profile's file for the counting trainer."""
    command = f"{sys.executable} {COUNTING} --ranks {{ranks}} --steps {{steps}} --out {{out}}"
    trainer = {
        "name": "counting",
        "command": f"{command} --fault {fault}",
        "tokens_per_rank": 100,
        "log": LOG,
        "source": "test",
    }
    return {
        "extends": "cpu",
        "name": "counting",
        "title": "a trainer that counts",
        "trainer": {**trainer, **changed},
        "phases": {"baseline": {"launches": 1}, "long_run": {"steps": 120}},
        "required": ["baseline.completed"],
    }


def profile_of(folder: Path, found: Mapping[str, Any]) -> Profile:
    """The profile as it is read from its file."""
    path = folder / "counting.yaml"
    path.write_text(yaml.safe_dump(dict(found)), "utf-8")
    return load_profile(str(path))


def launched(profile: Profile, folder: Path, phase: str = "baseline") -> LaunchEvidence:
    """The first launch of a phase, run to its end and read."""
    launch = registry.phases()[phase].plan(PlanContext(profile=profile))[0]
    result = run_launch(launch, LaunchOptions(run_root=folder, observer=Observer()))
    return read_launch(folder, launch, result)


def judged(profile: Profile, evidence: LaunchEvidence, phase: str = "baseline") -> dict[str, Check]:
    """Every check of the phase by its name, from this launch alone."""
    found = PhaseEvidence(launches={evidence.launch.name: evidence})
    judgement = registry.phases()[phase].judge(found, PlanContext(profile=profile))
    return {check.id.partition(".")[2]: check for check in judgement.checks}
