"""A hand-written report as a YAML file: its numbers, phase by phase, and how it scored itself."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, model_validator

from runbook.config.extends import locate, read_mapping, validated
from runbook.files import data_path, read_bytes
from runbook.records.measurement import Record

_Row = Literal[
    "throughput", "v2_parity", "group_consistency", "compression", "bucket_sweep", "scaling",
    "sdpa_audit", "long_run",
]  # fmt: skip
_Phase = Literal[
    "preflight", "baseline", "bucket_sweep", "sdpa_audit", "v2_parity", "nvtx", "single_gpu",
    "fused_adamw", "long_run", "fineweb",
]  # fmt: skip
# Lowest and highest, tok/s.
Span = tuple[float, float]
# In the order of the runbook.
PHASE_NAMES: tuple[str, ...] = get_args(_Phase)


class Status(StrEnum):
    """How far a phase got."""

    COMPLETED = "completed"
    CUT_OFF = "cut_off"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    NOT_RUN = "not_run"


class RunConfig(Record):
    """What a throughput was measured on. `batch` is global, before accumulation."""

    seq_len: int = Field(ge=1)
    batch: int = Field(ge=1)
    accumulation: int = Field(default=1, ge=1)

    def __str__(self) -> str:
        return f"S={self.seq_len}, batch {self.batch}, accumulation {self.accumulation}"


class Machine(Record):
    """Devices, and the peak of each in TFLOP/s at the type used."""

    devices: int = Field(ge=1)
    peak_tflops: float = Field(gt=0)


class Model(Record):
    """The model's size."""

    parameters: float = Field(gt=0)


class Acceptance(Record):
    """What the runbook asks for, on which config, and the rows its table must have."""

    config: str
    min_toks_per_s: float = Field(gt=0)
    rows: tuple[_Row, ...] = Field(min_length=1)
    source: str = Field(min_length=1)


class Result(Record):
    """One line of a results table, in one of three forms.

    `toks_per_s`: a range as reported. `rows`: log rows step -> rate. `launches`: one rate per
    launch (or per round of blocks), the only form that can pass anything near a limit.
    `stated_mean` is the mean that the report gives for `rows`. `control` marks an arm that runs
    with the baseline's settings. `csv` and `window` are the provenance of the number.
    """

    arm: str = ""
    config: str = ""
    devices: int = Field(ge=1)
    toks_per_s: tuple[float, float] | None = None
    rows: dict[int, float] = Field(default_factory=dict)
    launches: tuple[float, ...] = ()
    stated_mean: float | None = Field(default=None, gt=0)
    control: bool = False
    csv: str = ""
    window: str = ""

    @model_validator(mode="after")
    def _numbers(self) -> Result:
        forms = (self.toks_per_s is not None, bool(self.rows), bool(self.launches))
        if sum(forms) != 1:
            raise ValueError(
                "needs exactly one of toks_per_s: [low, high], rows: {step: toks_per_s},"
                " launches: [toks_per_s, ...]"
            )
        rates = [*(self.toks_per_s or ()), *self.rows.values(), *self.launches]
        if not all(0 < rate < float("inf") for rate in rates):
            raise ValueError(f"rates must be finite and above 0, got {rates}")
        if self.toks_per_s and self.toks_per_s[0] > self.toks_per_s[1]:
            raise ValueError(f"toks_per_s must be [low, high], got {list(self.toks_per_s)}")
        if any(step < 1 for step in self.rows):
            raise ValueError("steps are counted from 1")
        return self

    @property
    def after_first(self) -> list[float]:
        """Rates of the rows but step 1, which holds initialization and warm-up."""
        return [rate for step, rate in sorted(self.rows.items()) if step > 1]

    @property
    def span(self) -> Span | None:
        """Lowest and highest rate that counts as throughput; None if only warm-up is there."""
        if self.toks_per_s is not None:
            return self.toks_per_s
        if self.launches:
            return min(self.launches), max(self.launches)
        return (min(self.after_first), max(self.after_first)) if self.after_first else None


class PhaseTable(Record):
    """What a report says about one phase. `failed` and `not_run` name tests or parts of it."""

    status: Status
    claim: str = ""
    chosen: str = ""
    failed: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()
    results: tuple[Result, ...] = ()


class ScoredRow(Record):
    """A row of the report's own acceptance table."""

    row: _Row
    claim: str = Field(min_length=1)
    config: str = ""
    value: float | None = Field(default=None, gt=0)


class Report(Record):
    """A report's numbers, phase by phase, and how it scored itself."""

    schema_version: Literal[1]
    title: str = Field(min_length=1)
    source: str = Field(min_length=1)
    claimed_verdict: str
    machine: Machine
    model: Model
    acceptance: Acceptance
    window_rows: int = Field(default=50, ge=2)
    configs: dict[str, RunConfig]
    env: dict[str, str] = Field(default_factory=dict)
    phases: dict[_Phase, PhaseTable]
    scored: tuple[ScoredRow, ...] = ()

    @model_validator(mode="after")
    def _references(self) -> Report:
        used = [("acceptance", self.acceptance.config)]
        used += [(f"scored {row.row}", row.config) for row in self.scored if row.config]
        for name, phase in self.phases.items():
            used += [(f"phase {name}", line.config) for line in phase.results if line.config]
            arms = [line.arm for line in phase.results]
            if phase.chosen and phase.chosen not in arms:
                raise ValueError(f"phase {name}: chosen {phase.chosen!r} is not one of {arms}")
        unknown = [f"{where}: {config!r}" for where, config in used if config not in self.configs]
        if unknown:
            raise ValueError(
                f"unknown config of {', '.join(unknown)}; there are: {', '.join(self.configs)}"
            )
        return self

    def table(self, phase: str) -> PhaseTable:
        """The phase's table; one that was not run and is empty if the report does not have it."""
        there = (table for name, table in self.phases.items() if name == phase)
        return next(there, PhaseTable(status=Status.NOT_RUN))

    def measured(self, phase: str) -> list[tuple[Result, Span]]:
        """The result lines of a phase that give a throughput, each with the lowest and highest."""
        return [(line, line.span) for line in self.table(phase).results if line.span]

    def claims(self, row: str) -> str:
        """What the acceptance table says in the rows of this name."""
        return ", ".join(one.claim for one in self.scored if one.row == row)


def load_report(name_or_path: str) -> tuple[Report, Path, str]:
    """The report, its file and the sha256 of that.

    Args:
        name_or_path: a path ending in .yaml, or the name of a shipped replay such as `report_v4`.

    Raises:
        UsageError: no such file, not YAML; or everything that is wrong in it.
    """
    path = locate("replay", name_or_path, data_path("configs") / "replays")
    report = validated(Report, read_mapping("replay", path), str(path))
    return report, path, hashlib.sha256(read_bytes(path)).hexdigest()
