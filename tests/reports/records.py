"""Records to render: those made by hand, and those of machines that are generated and judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rehearsal.judged import judge
from benchmarks.rehearsal.machine import MACHINES
from runbook.records import RunRecord
from tests.reports.samples import SAMPLES
from tests.shared import once
from tests.tiers import by_tier

# One of each kind: GO, a fault before anything starts, a card that dies, a loss that is NaN.
REHEARSED = ("healthy_a100x2_pcie4", "mig_on", "xid_79", "nan_at_step_412")
# To judge all nine phases of a healthy machine takes as long as all others together.
NAMES = by_tier((*SAMPLES, *REHEARSED), fast=lambda name: name != REHEARSED[0])


def record_called(factory: pytest.TempPathFactory, name: str) -> RunRecord:
    """The record of that name; a machine is judged once in a test run."""
    if name in SAMPLES:
        return SAMPLES[name]()

    def make(folder: Path) -> str:
        machine = next(one for one in MACHINES if one.name == name)
        judge(machine, keep=folder)
        return next(folder.glob("*/run.json")).read_text(encoding="utf-8")

    return RunRecord.model_validate_json(once(factory, f"rehearsed-{name}", make))
