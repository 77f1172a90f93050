"""What a phase is given to judge: everything read from its launches, and nothing live.

`judge` is a pure function of these objects, so that a finished run can be judged again from its
artifacts alone, on another machine, under other limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field

from runbook.records import Launch, LaunchResult
from runbook.records.measurement import Record

if TYPE_CHECKING:
    import pandas as pd

# A table, and a column of numbers: pandas is loaded only where one is made.
Frame: TypeAlias = "pd.DataFrame"
Column: TypeAlias = "pd.Series[float]"


@dataclass(frozen=True, kw_only=True)
class RowFile:
    """The complete rows of a CSV file, its digest, and what was wrong with the rest.

    `legacy`: it has no header, as the older form.
    """

    frame: Frame
    sha256: str
    legacy: bool = False
    dropped_rows: int = 0
    problems: tuple[str, ...] = ()
    damaged: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainingLog(RowFile):
    """A training.csv as read.

    `frame` has the columns step, loss, lr, toks_per_s, tokens, dt_s, grad_norm, mem_mib, arm
    (str), block (int), warmup (bool), fetch_s, host_s; columns that the file lacks are absent. Of a
    trainer of one's own it is what `runbook.folder.launch.own_log` says.
    """

    path: str


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The trainer's proof that a toggle did something, or that it did not."""

    toggle: str
    value: str
    took_effect: bool | None
    evidence: Any
    arm: str = ""
    block: int = 0
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class RankLog:
    """A heartbeat file of one rank.

    `steps` has a row for each optimizer step that the rank ended: step, mono and ts (s), alone
    (nothing but the step since the one before), embedded (tokens), data (digest), mem_mib,
    reserved_mib, rss_mib, cuda_mib, cpu_s (of the whole process so far), and, where the step
    reported progress, loss, toks_per_s, grad_norm and fetch_s; fetch_clock_s is what lies between
    the marks before and after fetching, timed_from (s, as mono) the last mark before the step's
    time begins. `beside` has for each step, the first apart,
    the events since the step before that are no part of a step. `checkpoints` are those that were
    written, each with its path and the seconds it took; `evaluations` have the step before them,
    the losses, and the digest of the rows that they read. `clock_s` lies between the first record
    and the last, `silence_s` is the longest time between two (None of fewer); `steps_back` and
    `clocks_back` say at how many places a step, or one of the two clocks, goes back; `misshapen`
    are values of another shape than their readers expect.
    """

    rank: int
    path: str
    sha256: str
    events: int
    tokens: frozenset[str] = frozenset()
    first_step: int | None
    last_step: int | None
    exit_code: int | None = None
    exit_reason: str = ""
    param_hash: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    effects: tuple[Effect, ...] = ()
    ddp_buckets: tuple[Mapping[str, Any], ...] = ()
    arm_failures: tuple[Mapping[str, Any], ...] = ()
    checkpoints: tuple[Mapping[str, Any], ...] = ()
    evaluations: tuple[Mapping[str, Any], ...] = ()
    nonfinite: Mapping[str, Any] | None = None
    halt_reason: str | None = None
    pids: tuple[int, ...] = ()
    clock_s: float | None = None
    silence_s: float | None = None
    last_event: str = ""
    last_ts: float | None = None
    steps_back: int = 0
    clocks_back: int = 0
    proof: Mapping[str, Any] | None = None
    ending: Mapping[str, Any] = field(default_factory=dict)
    steps: Frame | None = None
    beside: Mapping[int, frozenset[str]] = field(default_factory=dict)
    misshapen: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    damaged: bool = False


@dataclass(frozen=True, kw_only=True)
class JUnitCase:
    """One test of a JUnit file: `status` is passed, failed, error or skipped."""

    name: str
    classname: str
    status: str
    message: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JUnitReport:
    """A JUnit file as read."""

    path: str
    sha256: str
    cases: tuple[JUnitCase, ...]


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """A start of a launch that does not count: cut off, tried again, or repeated.

    Times in s since the epoch: when it was started, when its first rank ended its first step (None
    if it ended none), and that rank's last word.
    """

    folder: str
    began: float
    first_step: float | None
    ended: float


@dataclass(frozen=True, kw_only=True)
class LaunchEvidence:
    """One launch: the plan, the end, and what its run directory holds (None where it is absent).

    Of a trainer of one's own, `training` is its log, `ranks` when that grew, `processes` its
    processes with their memory, and `last_steps` what ranks with heartbeats of their own told.
    `aside` are its earlier starts. `files` has path and digest of each file that is there, by the
    name of its field, `console` and `trace`. `config` is what its config file says, by the run's
    own copy, without what the plan changes in it.
    """

    launch: Launch
    result: LaunchResult
    files: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    training: TrainingLog | None = None
    gates: Frame | None = None
    val: Frame | None = None
    ranks: tuple[RankLog, ...] = ()
    env: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    audit: Mapping[str, Any] | None = None
    profile: Mapping[str, Any] | None = None
    ceilings: Mapping[str, Any] | None = None
    junit: JUnitReport | None = None
    console_lines: tuple[str, ...] = ()
    gpu_samples: Frame | None = None
    devices_before: Mapping[str, Any] | None = None
    devices_after: Mapping[str, Any] | None = None
    checkout: Mapping[str, Any] | None = None
    kernel_log: Mapping[str, Any] | None = None
    load: Mapping[str, Any] | None = None
    processes: Frame | None = None
    resources: Frame | None = None
    last_steps: Mapping[int, int | None] = field(default_factory=dict)
    halted: bool = False
    aside: tuple[SetAside, ...] = ()
    problems: tuple[str, ...] = ()

    def path(self, kind: str) -> str:
        """Where the file of this kind is; empty where it is not there."""
        return self.files.get(kind, ("", ""))[0]

    @property
    def after(self) -> int:
        """The step of the checkpoint that it was told to go on from; 0 for a new launch."""
        return self.result.begun.step if self.result.begun else self.launch.after

    @property
    def asked(self) -> int:
        """The last step that the attempt that counts was asked for: a retry may be shorter."""
        return self.launch.steps if self.result.steps is None else self.result.steps

    def effects(self, toggle: str, *, arm: str | None = None) -> tuple[Effect, ...]:
        """All ranks' effects of one toggle, of one arm if named."""
        return tuple(
            effect
            for rank in self.ranks
            for effect in rank.effects
            if effect.toggle == toggle and (arm is None or effect.arm == arm)
        )


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Something found out about the machine or the checkout, kept as an artifact.

    None needs a `note` that says why there is no value. `sha256` is empty while the file at `path`
    may still grow.
    """

    name: str
    value: str | int | float | bool | None
    unit: str = ""
    path: str
    sha256: str = ""
    note: str = ""


class AcceptedRun(Record):
    """What an earlier run that was GO measured in a phase, as far as it could be checked.

    `rates` has the throughput of each launch in tok/s; `facts` what they ran on and with: kind,
    name and text; `run_sha256` is the digest of that run's run.json.
    """

    run_id: str
    run_sha256: str
    rates: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = Field(min_length=1)
    facts: tuple[tuple[str, str, str], ...]

    @property
    def by_name(self) -> dict[tuple[str, str], str]:
        """The facts by kind and name."""
        return {(kind, name): text for kind, name, text in self.facts}


class AcceptedRuns(Record):
    """Earlier accepted runs, oldest first; `left_out` says why of each that was not taken.

    `damaged` names those that were accepted, or may have been, and whose files are not those that
    the run wrote. `problem` says what is wrong with the file at `path`, if anything is.
    """

    schema_version: Literal[2] = 2
    runs: tuple[AcceptedRun, ...] = ()
    left_out: dict[str, str] = Field(default_factory=dict)
    damaged: dict[str, str] = Field(default_factory=dict)
    path: str = Field(default="", exclude=True)
    sha256: str = Field(default="", exclude=True)
    problem: str = Field(default="", exclude=True)


@dataclass(frozen=True, kw_only=True)
class PhaseEvidence:
    """What one phase is judged from; `earlier` holds the phases that were judged before it.

    `accepted` are earlier runs that were GO; None where the phase asks for none.
    """

    launches: Mapping[str, LaunchEvidence] = field(default_factory=dict)
    facts: Mapping[str, Fact] = field(default_factory=dict)
    earlier: Mapping[str, PhaseEvidence] = field(default_factory=dict)
    accepted: AcceptedRuns | None = None
