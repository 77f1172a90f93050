"""Read a replay file; everything wrong with it in one message."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from pathlib import Path
from typing import Literal, cast, get_args

from pydantic import Field, ValidationError, model_validator

from runbook.config.extends import mapping_of
from runbook.errors import UsageError, did_you_mean
from runbook.files import data_path, read_given
from runbook.records.measurement import Record

_Phase = Literal[
    "preflight",
    "baseline",
    "bucket_sweep",
    "sdpa_audit",
    "v2_parity",
    "nvtx",
    "single_gpu",
    "fused_adamw",
    "long_run",
    "fineweb",
]
_Row = Literal[
    "throughput",
    "v2_parity",
    "group_consistency",
    "compression",
    "bucket_sweep",
    "scaling",
    "sdpa_audit",
    "long_run",
]
# In the order of the runbook, which leaves fused AdamW and FineWeb-Edu optional.
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
    def span(self) -> tuple[float, float] | None:
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


class ReplayFile(Record):
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
    def _references(self) -> ReplayFile:
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
        return self.phases.get(cast(_Phase, phase)) or PhaseTable(status=Status.NOT_RUN)

    def results(self, phase: str) -> tuple[Result, ...]:
        """The result lines of a phase; none if the report does not have it."""
        return self.table(phase).results


_KEYS = sorted(
    {
        key
        for model in (ReplayFile, Acceptance, PhaseTable, Result, RunConfig, ScoredRow)
        for key in model.model_fields
    }
)


def replay_names() -> tuple[str, ...]:
    """Names of the shipped replays."""
    return tuple(sorted(path.stem for path in (data_path("configs") / "replays").glob("*.yaml")))


def load_replay(name_or_path: str) -> tuple[ReplayFile, Path, str]:
    """The table, its path and the sha256 of the file.

    Args:
        name_or_path: a file, or the name of a shipped replay such as `report_v4`.

    Raises:
        UsageError: no such file, not YAML, unknown keys, values that are not allowed.
    """
    path = Path(name_or_path)
    if name_or_path in replay_names():
        path = data_path("configs") / "replays" / f"{name_or_path}.yaml"
    try:
        data = read_given(path, pipe=True)
        text = data.decode("utf-8")
    except OSError as error:
        near = did_you_mean(name_or_path, replay_names())
        raise UsageError(
            f"{name_or_path}: {error.strerror or error}{near}",
            hint=f"a path to a YAML file, or one of: {', '.join(replay_names())}",
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
    document = mapping_of(text, path)
    try:
        replay = ReplayFile.model_validate(document)
    except ValidationError as error:
        raise UsageError([f"{path}: {text}" for text in _problems(error)]) from error
    return replay, path, hashlib.sha256(data).hexdigest()


def _problems(error: ValidationError) -> list[str]:
    found = []
    for detail in error.errors():
        place = ".".join(str(part) for part in detail["loc"] if part != "[key]") or "file"
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            message = f"unknown key{did_you_mean(str(detail['loc'][-1]), _KEYS)}"
        shown = "" if isinstance(detail["input"], dict) else f", got {detail['input']!r}"
        found.append(f"{place}: {message}{shown}")
    return found
