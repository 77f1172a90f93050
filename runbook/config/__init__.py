"""What a run is made from: a profile, with the machine, what runs on it, and every limit's source.

Presets, plans and settings given with `--set` go into it. A phase declares a limit in code, which
owns name, unit, comparator and meaning; the profile owns value, source and whether it decides on
that machine. Nothing else compares a number with a limit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from nsa.contract import Ceiling
from nsa.settings import Count, Whole
from runbook.records.measurement import Record, unsaid
from runbook.records.outcome import Comparator
from runbook.records.own_trainer import OwnTrainer

_HOLDS: dict[Comparator, Callable[[float, float], bool]] = {
    Comparator.AT_LEAST: operator.ge,
    Comparator.ABOVE: operator.gt,
    Comparator.AT_MOST: operator.le,
    Comparator.BELOW: operator.lt,
}

# A share of the devices' peak below which nobody trains: the clock, the counts or the machine are
# wrong, and a floor beneath it can catch nothing. A healthy trainer of 0.1 billion parameters uses
# 20 to 40 %, one that waits for its host 2 to 4 %.
IDLE_MFU = 0.01


class LimitValue(Record):
    """What a profile says of a limit. `gated` false: shown, never decides.

    Unit and comparator belong to the declaration (`LimitSpec`). A profile need not
    repeat them; one that does has to agree.
    """

    value: float = Field(allow_inf_nan=False)
    source: str = Field(min_length=1)
    gated: bool = True
    unit: str | None = None
    comparator: str | None = None


class LimitUse(StrEnum):
    """What a profile may do with a limit.

    A gate decides unless the profile only shows it (`gated: false`). An aim is always shown only.
    A rule is a part of how a decision is made, which a profile cannot switch off.
    """

    GATE = "gate"
    AIM = "aim"
    RULE = "rule"


@dataclass(frozen=True, kw_only=True)
class LimitSpec:
    """A limit as a phase declares it. `comparator` reads `value comparator limit`.

    `toggle` names the toggle that owns the value, where the trainer's watchdog uses it too: such a
    limit is set with the toggle and not in a profile. `timed`: it decides only where the profile
    lets throughputs decide.
    """

    name: str
    unit: str
    comparator: Comparator
    meaning: str
    use: LimitUse = LimitUse.GATE
    toggle: str = ""
    timed: bool = False

    def __post_init__(self) -> None:
        if self.comparator not in _HOLDS:
            raise ValueError(f"limit {self.name!r}: {self.comparator!r} compares no numbers")

    @property
    def floor(self) -> bool:
        """Is a higher value the better one?"""
        return self.comparator in (Comparator.AT_LEAST, Comparator.ABOVE)

    def problems(self, given: LimitValue) -> list[str]:
        """What a profile says of it that is against its declaration."""
        problems = []
        if given.comparator is not None and given.comparator != self.comparator.value:
            wanted = f"this limit is declared {self.comparator.value!r}"
            problems.append(f"comparator: {wanted}, got {given.comparator!r}; leave the key out")
        if given.unit is not None and given.unit != self.unit:
            wanted = f"this limit is declared in {self.unit!r}"
            problems.append(f"unit: {wanted}, got {given.unit!r}; leave the key out")
        if self.use is LimitUse.AIM and given.gated:
            problems.append("gated: this is an aim, which never decides; expected false")
        if self.use is LimitUse.RULE and not given.gated:
            problems.append(
                "gated: this is a part of a rule and cannot be shown only; expected true"
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A limit in force: the declaration with a profile's value, source and `gated`."""

    spec: LimitSpec
    value: float
    source: str
    gated: bool

    def holds(self, value: float) -> bool:
        """Does the measured value keep to the limit? A NaN never does."""
        return not math.isnan(value) and _HOLDS[self.spec.comparator](value, self.value)

    def __str__(self) -> str:
        unit = f" {self.spec.unit}" if self.spec.unit else ""
        return f"{self.spec.comparator.value} {self.value:g}{unit}"


@dataclass(frozen=True, kw_only=True)
class FixedRule:
    """A rule with a number that is the same on every machine; `why` it is no profile's business."""

    what: str
    rule: str
    why: str


class Sourced(Record):
    """A setting and where it comes from; always text, as in an environment.

    A toggle's meaning is in its own table; other variables may say theirs here.
    """

    value: str
    source: str = Field(min_length=1)
    meaning: str = ""


# A card's clocks and timers keep to its specification within a percent or two: what is faster than
# this share of what it allows was not measured.
MOST_OF_PEAK = 1.03


class Peak(Record):
    """The most that the specification of a device or a link allows, in the unit of its ceiling."""

    value: float = Field(gt=0, allow_inf_nan=False)
    source: str = Field(min_length=1)

    def beyond(self, rate: float) -> str:
        """Why such a rate is impossible, or an empty string."""
        if rate <= MOST_OF_PEAK * self.value:
            return ""
        return (
            f"more than {MOST_OF_PEAK:g} times the {self.value:g} that are possible ({self.source})"
        )


# Ceilings that a specification bounds; of a small all-reduce only its time means something.
BOUNDED = tuple(what for what in Ceiling if what is not Ceiling.LATENCY)


class Hardware(Record):
    """The machine that the numbers are meant for; None where nothing is expected.

    `gpu_name` is a part of the name that nvidia-smi prints. `peak_tflops` is the dense peak of
    one device in the profile's type, from which MFU follows. `peaks` are what no measured ceiling
    can pass: TFLOP/s of `matmul`, GB/s of `memory_copy`, `host_copy` and `all_reduce`. `gpus` are
    those of one of `nodes`; `interconnect` is what has to link these.
    """

    device: Literal["cpu", "cuda"]
    gpus: int = Field(ge=0)
    nodes: int | None = unsaid(None, ge=1)
    interconnect: Literal["infiniband"] | None = unsaid(None)
    gpu_name: str | None = None
    gpu_memory_gib: float | None = Field(default=None, gt=0)
    pcie_gen: int | None = Field(default=None, ge=1)
    pcie_width: int | None = Field(default=None, ge=1)
    nvlink: bool | None = None
    peak_tflops: float | None = Field(default=None, gt=0)
    peak_source: str = ""
    peaks: dict[str, Peak] = Field(default_factory=dict)
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Hardware:
        if (self.device == "cpu") != (self.gpus == 0):
            raise ValueError(
                f"device {self.device!r} with gpus {self.gpus}: cpu has 0, cuda has 1+"
            )
        if self.peak_tflops is not None and not self.peak_source:
            raise ValueError("peak_tflops needs peak_source, where the number comes from")
        if odd := sorted(set(self.peaks) - set(BOUNDED)):
            raise ValueError(f"peaks: unknown {', '.join(odd)}; known are {', '.join(BOUNDED)}")
        lacking = [what for what in BOUNDED if what not in self.peaks]
        if self.device == "cuda" and lacking:
            raise ValueError(
                f"peaks: {', '.join(lacking)} is missing: without what the device's specification "
                "allows, a measured ceiling that is impossible would pass"
            )
        return self


class Workload(Record):
    """What the acceptance is defined on: a friendlier run does not count."""

    seq_len: int = Field(ge=1)
    global_batch: int = Field(ge=1)
    accumulation: int = Field(ge=1)
    dtype: str
    production_steps: int = Field(ge=1)
    source: str = Field(min_length=1)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, all ranks and micro-batches."""
        return self.seq_len * self.global_batch * self.accumulation


class Stage(Record):
    """What a plan says of a phase that it makes from a kind (`runbook.config.registry.kinds`).

    `order` is its place in the plan; `checks` are the kind's checks that it has, of which a GO
    needs those that the machine can answer. `least_steps` are kept under `--steps-scale`. `legs`
    launches follow each other, each from the checkpoint of the one before. `resume_steps` above 0:
    the last ones are trained a second time, from a checkpoint. `needs_go`: it starts only
    behind a GO of the same configuration and machine, or with `--without-go`.
    """

    kind: str
    title: str = Field(min_length=1)
    order: int = Field(ge=0)
    dataset: str = "synthetic"
    checks: tuple[str, ...] = Field(min_length=1)
    least_steps: Whole = 1
    legs: Whole = 1
    resume_steps: Count = 0
    needs_go: bool = False


class PhaseSettings(Record):
    """How much one phase runs, and with which settings.

    `steps` are those of one launch, or of one arm in one block where arms take turns; `warmup`
    steps come before each block and count in no statistic. `single_steps` is the length of the one
    launch under `--protocol single`. `typical_s` is how long one launch took on the machine of
    `hardware.source`: a first estimate for `--dry-run`, never a limit.
    """

    steps: Count = 0
    launches: Whole = 1
    rounds: Whole = 1
    warmup: Count = 0
    single_steps: Whole | None = None
    retry_steps: Whole | None = None
    profile_steps: Count = 0
    arms: tuple[str, ...] = ()
    timeout_s: float = Field(gt=0)
    typical_s: float | None = Field(default=None, gt=0)
    env: dict[str, Sourced] = Field(default_factory=dict)
    config_overrides: dict[str, str | int | float | bool] = Field(default_factory=dict)
    source: str = Field(min_length=1)
    stage: Stage | None = unsaid(None)

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the phase as an environment."""
        return {name: one.value for name, one in self.env.items()}


class PlanNote(Record):
    """The plan that a profile was given: its name, and its phases in running order.

    `shipped` is false for a file of one's own. `stops`: nothing starts behind a phase that did not
    pass. `go` is the accepted run behind it, with what that one said; empty if there is none.
    `parameters`: how many the model of that run has; 0 if that is not known.
    """

    name: str
    shipped: bool
    stops: bool
    phases: tuple[str, ...]
    go: str = ""
    parameters: int = Field(default=0, ge=0)


class Profile(Record):
    """One kind of machine, and what has to hold on it for a GO.

    `config` and `config_single` are trainer configs, names inside `configs/` or paths. `trainer` is
    the module that is started with `-m` and keeps the trainer's contract; `own_trainer` is any
    other program in its place (a file calls both `trainer`). `required` lists the checks that a
    GO needs. `kernels` lists what each branch may use, one of them or several. What a
    verdict is about is derived from what ran, never written here.
    """

    schema_version: Literal[1] = 1
    name: str = Field(pattern=r"^[a-z0-9_]+$")
    title: str = Field(min_length=1)
    ranks: int = Field(ge=1, le=65_536)
    config: str = Field(pattern=r"\.ya?ml$")
    config_single: str = Field(pattern=r"\.ya?ml$")
    trainer: str = Field(default="nsa.train", pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
    own_trainer: OwnTrainer | None = unsaid(None)
    branch: str | None = None
    hardware: Hardware
    workload: Workload
    throughput_gated: bool
    env: dict[str, Sourced] = Field(default_factory=dict)
    phases: dict[str, PhaseSettings]
    limits: dict[str, LimitValue]
    kernels: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    kernels_source: str = ""
    required: tuple[str, ...] = Field(min_length=1)
    plan: PlanNote | None = unsaid(None)

    @model_validator(mode="after")
    def _whole(self) -> Profile:
        gpus = self.hardware.gpus * (self.hardware.nodes or 1)
        if self.hardware.device == "cuda" and self.ranks > gpus:
            raise ValueError(f"ranks {self.ranks} need that many GPUs, not {gpus}")
        twice = sorted({name for name in self.required if self.required.count(name) > 1})
        if twice:
            raise ValueError(f"required names twice: {', '.join(twice)}")
        if self.kernels and not self.kernels_source:
            raise ValueError("kernels needs kernels_source, where the expectation comes from")
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step of all ranks."""
        own = self.own_trainer
        return own.tokens(self.ranks) if own else self.workload.tokens_per_step

    def workload_of(self, phase: str) -> Workload:
        """What the launches of a phase train: its own NSA_ACCUM goes over the profile's."""
        own = self.phases[phase].env.get("NSA_ACCUM") if phase in self.phases else None
        told = {"accumulation": int(own.value)} if own else {}
        return self.workload.model_copy(update=told)

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the whole profile as an environment."""
        return {name: one.value for name, one in self.env.items()}

    def limit(self, spec: LimitSpec) -> Limit:
        """The limit in force; every phase's limits are checked when a profile is loaded."""
        given = self.limits[spec.name]
        gated = given.gated and (self.throughput_gated or not spec.timed)
        return Limit(spec=spec, value=given.value, source=given.source, gated=gated)

    def cost(self, seconds: float, gpu_hour_price: float) -> float:
        """What these seconds cost on its devices, in the currency of the price."""
        return seconds / 3600 * max(self.hardware.gpus, 1) * gpu_hour_price

    @property
    def has_gpu(self) -> bool:
        """True where the profile is for a machine with GPUs."""
        return self.hardware.device == "cuda"
