"""A hand-written report as a YAML file: its numbers, phase by phase, and how it scored itself."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field, model_validator

from runbook.config.extends import locate, read_mapping, validated
from runbook.files import data_path, read_bytes
from runbook.records.measurement import Record
from runbook.records.outcome import Outcome
from runbook.stats import Decided
from runbook.stats.launches import meets_target

_Row = Literal[
    "throughput", "v2_parity", "group_consistency", "compression", "bucket_sweep", "scaling",
    "sdpa_audit", "long_run",
]  # fmt: skip
_Phase = Literal[
    "preflight", "baseline", "bucket_sweep", "sdpa_audit", "v2_parity", "nvtx", "single_gpu",
    "fused_adamw", "long_run", "fineweb",
]  # fmt: skip
# How far a phase got.
Status = Literal["completed", "cut_off", "timed_out", "crashed", "not_run"]
# Of tokens a second, and the lowest and highest of several.
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Span = tuple[float, float]
# In the order of the runbook.
PHASE_NAMES: tuple[str, ...] = get_args(_Phase)


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
    with the baseline's settings.
    """

    arm: str = ""
    config: str = ""
    devices: int = Field(ge=1)
    toks_per_s: tuple[Rate, Rate] | None = None
    rows: dict[Annotated[int, Field(ge=1)], Rate] = Field(default_factory=dict)
    launches: tuple[Rate, ...] = ()
    stated_mean: Rate | None = None
    control: bool = False

    @model_validator(mode="after")
    def _numbers(self) -> Result:
        forms = (self.toks_per_s is not None, bool(self.rows), bool(self.launches))
        if sum(forms) != 1:
            raise ValueError(
                "needs exactly one of toks_per_s: [low, high], rows: {step: toks_per_s},"
                " launches: [toks_per_s, ...]"
            )
        if self.toks_per_s and self.toks_per_s[0] > self.toks_per_s[1]:
            raise ValueError(f"toks_per_s must be [low, high], got {list(self.toks_per_s)}")
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
        return next(there, PhaseTable(status="not_run"))

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


# What the runbook leaves optional, and what its own acceptance table has: G2 and L1.
OPTIONAL_PHASES = ("fused_adamw", "fineweb")
ACCEPTANCE_ROWS = tuple(row for row in get_args(_Row) if row != "group_consistency")


class Breach(NamedTuple):
    """Where a rule is broken: the report's word and what its numbers say.

    `outcome` is what it amounts to where that is not the same for all breaches of the rule.
    """

    phase: str
    claimed: str
    found: str
    outcome: Outcome | None = None


Find = Callable[[Report], Iterator[Breach]]


def _throughput(report: Report) -> Iterator[Breach]:
    config, floor = report.acceptance.config, report.acceptance.min_toks_per_s
    claimed = report.claims("throughput")
    lines = [(line, span) for line, span in report.measured("baseline") if line.config == config]
    if not lines:
        warm = any(line.config == config for line in report.table("baseline").results)
        found = f"{config}: {'only warm-up rows' if warm else 'not measured'}"
        yield Breach("baseline", claimed, found, Outcome.INCOMPLETE)
    for line, span in lines:
        text = f"{config}: {rates(span)} tok/s, floor {floor:g}"
        worst, best = (meets_target(line.launches or [rate], floor) for rate in span)
        if best.outcome is Decided.FAIL:
            yield Breach("baseline", claimed, text)
        elif worst.outcome is not Decided.PASS:
            why = f"{text}; {worst.reason}"
            yield Breach("baseline", claimed, why, Outcome.INCONCLUSIVE)


def _another_config(report: Report) -> Iterator[Breach]:
    wanted = report.acceptance.config
    for row in report.scored:
        if row.row == "throughput" and row.config and row.config != wanted:
            seen, asked = report.configs[row.config], report.configs[wanted]
            found = f"measured on {row.config} ({seen}), asked for {wanted} ({asked})"
            yield Breach("baseline", row.claim, found)


def _rows_missing(report: Report) -> Iterator[Breach]:
    there = {row.row for row in report.scored}
    for name in dict.fromkeys((*ACCEPTANCE_ROWS, *report.acceptance.rows)):
        if name not in there:
            found = f"the acceptance table has no row {name}"
            yield Breach("acceptance", report.claimed_verdict, found)


_FAILING = (
    r"fail(?:s|ed|ing|ures?)?|nans?|infs?|infinite|non-?finite|diverg(?:ed|es|ing)|crash(?:ed|es)?|"
    r"hangs?|hung|hanging|oom|out of memory|errors?|abort(?:ed|s)?|killed|broken|no-?go|"
    r"exceptions?|not met|unmet|missed|did not (?:pass|reach|finish|complete)|timed? ?out"
)
_FAILED = re.compile(rf"(?<![\w.])(?:{_FAILING})(?!\w)", re.IGNORECASE)
# "no NaN", "0 failures", "without errors" say the opposite.
_DENIED = re.compile(
    rf"(?<![\w.])(?:no|not|0|zero|without(?: any)?|never)[ -](?:{_FAILING})(?!\w)", re.IGNORECASE
)
_PENDING = re.compile(
    r"(?<!\w)(?:pending|partial(?:ly)?|deferred|skipped|todo|tbd|incomplete|conditional(?:ly)?"
    r"|not (?:run|done|tested|measured)|unknown|n/a)(?!\w)",
    re.IGNORECASE,
)


def _own_words(report: Report) -> Iterator[Breach]:
    said = [("acceptance", report.claimed_verdict)]
    said += [("acceptance", f"{row.row}: {row.claim}") for row in report.scored]
    said += [(name, table.claim) for name, table in report.phases.items()]
    for phase, words in said:
        if found := _FAILED.search(_DENIED.sub("", words)):
            yield Breach(phase, words, f"it says {found[0]!r} itself", Outcome.FAIL)
        elif phase == "acceptance" and (found := _PENDING.search(words)):
            yield Breach(phase, words, f"it says {found[0]!r} itself")


def _not_passed(report: Report) -> Iterator[Breach]:
    for name in PHASE_NAMES:
        table = report.table(name)
        if table.status != "completed" and name not in OPTIONAL_PHASES:
            outcome = Outcome.FAIL if table.status == "crashed" else None
            yield Breach(name, table.claim, table.status.replace("_", " "), outcome)
        if table.failed:
            yield Breach(name, table.claim, f"{', '.join(table.failed)} failed", Outcome.FAIL)
        if table.not_run:
            yield Breach(name, table.claim, f"no result of {', '.join(table.not_run)}")


def rates(span: Span) -> str:
    """One rate, or a range of them."""
    low, high = span
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


FORM: Mapping[str, Find] = {
    "acceptance.throughput": _throughput,
    "acceptance.config": _another_config,
    "acceptance.rows": _rows_missing,
    "claim.not_passed": _own_words,
    "phase.not_passed": _not_passed,
}
