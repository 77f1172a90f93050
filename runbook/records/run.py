"""`run.json`: everything a report says, and nothing it does not; and the contract of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pydantic import Field, TypeAdapter

from runbook.errors import called_by, verdict_text
from runbook.records.invocation import Invocation
from runbook.records.launch import Launch, LaunchResult
from runbook.records.measurement import Measurement, Record, Series, Table
from runbook.records.outcome import Check, Outcome, Verdict, satisfies

# Under this name a record's environment keeps the digest of the package under test, which every
# launch says of itself.
PACKAGE = "package"
# Its folder is no part of the identity: the same code may lie elsewhere when a run goes on.
PACKAGE_PATH = "package.path"
# How to type the program where the run was made, if its name alone does not find it.
PROGRAM = "program"
# The fact that has the nodes of a run by name, with a comma between.
NODE_NAMES = "nodes.names"
# What takes a node out of the cluster that the run was on, by its launcher (`takes_out`).
TAKES_OUT = "takes_out"
_INVOCATION = TypeAdapter(Invocation)


class LaunchEntry(Record):
    """A planned launch beside its result."""

    launch: Launch
    result: LaunchResult


class ArtifactRecord(Record):
    """A file of the run, relative to its folder, with its digest."""

    path: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size_bytes: int = Field(ge=0)


class Ran(Record):
    """A device and a workload that launches ran on, by their env.json; 0 where it does not say."""

    device: str
    name: str
    ranks: int = Field(ge=0)
    parameters: int = Field(ge=0)
    seq_len: int = Field(ge=0)
    global_batch: int = Field(ge=0)
    accumulation: int = Field(ge=0)
    dtype: str


class Repeated(Record):
    """How a phase ended before it was run again.

    `started`: whether a launch of it had been started. `folder` holds what it left.
    """

    outcome: Outcome
    reason: str
    started: bool
    folder: str


class PhaseRecord(Record):
    """One phase: launches, measurements, checks, tables, and what it chose for later phases.

    `remedies` has what to do about each launch that did not end well, by its name, and
    `first_commands` what its remedy has typed first, where it has that. `repeated` has the earlier
    attempts of a phase that was run again, oldest first. `comparisons` has only what earlier
    versions kept for pictures.
    """

    name: str
    title: str
    source: str
    outcome: Outcome
    optional: bool = False
    started_at: str = ""
    duration_s: float = 0.0
    launches: tuple[LaunchEntry, ...] = ()
    ran: tuple[Ran, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    checks: tuple[Check, ...] = ()
    tables: tuple[Table, ...] = ()
    series: tuple[Series, ...] = ()
    comparisons: tuple[dict[str, Any], ...] = ()
    choices: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    remedies: dict[str, str] = Field(default_factory=dict)
    first_commands: dict[str, str] = Field(default_factory=dict)
    repeated: tuple[Repeated, ...] = ()

    @property
    def flaky(self) -> tuple[str, ...]:
        """Names of the launches that finished only at a second attempt."""
        return tuple(e.launch.name for e in self.launches if e.result.ok and e.result.attempts > 1)

    @property
    def left_out(self) -> bool:
        """True if it was not asked for: it has rows, and none of them was."""
        return bool(self.checks) and all(check.left_out for check in self.checks)

    @property
    def passed(self) -> str:
        """How many checks are PASS, `11 of 15, 9 skipped`: skips that block nothing are apart."""
        if not self.checks or self.left_out:
            return f"{len(self.checks)} not asked for" if self.checks else "none"
        skips = [check for check in self.checks if check.outcome is Outcome.SKIPPED]
        skipped = sum(not check.required or satisfies(check) for check in skips)
        passed = sum(check.outcome is Outcome.PASS for check in self.checks)
        text = f"{passed} of {len(self.checks) - skipped}"
        return f"{text}, {skipped} skipped" if skipped else text

    @property
    def tally(self) -> str:
        """`checks: 11 of 15, 9 skipped, FLAKY: run1`."""
        text = f"checks: {self.passed}" if self.checks else "no checks"
        return f"{text}, FLAKY: {', '.join(self.flaky)}" if self.flaky else text

    @property
    def unchecked(self) -> tuple[Measurement, ...]:
        """The measurements that none of its checks shows."""
        shown = [check.measurement for check in self.checks]
        return tuple(one for one in self.measurements if one not in shown)

    def numbers(self) -> Iterator[tuple[str, Measurement | None, Check | None]]:
        """What it measured: of each check by its id, then `unchecked` as `phase/measurement`."""
        for check in self.checks:
            yield check.id, check.measurement, check
        for one in self.unchecked:
            yield f"{self.name}/{one.name}", one, None


class RunRecord(Record):
    """One run of the runbook on one machine.

    `scope` and `caveats` are derived (`runbook.engine.scope`), never typed by anybody. `settings`
    is what a person gave; `sources` says of these and of `exports` where each comes from, and
    `config_before` what the config has for those of its keys that were given, where it can be read.
    """

    schema_version: Literal[1] = 1
    tool_version: str
    run_id: str
    profile: str
    profile_sha256: str
    profile_document: dict[str, object]
    scope: str
    caveats: tuple[str, ...] = ()
    verdict: Verdict
    reasons: tuple[str, ...]
    started_at: str
    finished_at: str | None
    interrupted: bool = False
    command: str
    settings: dict[str, str] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)
    config_before: dict[str, str] = Field(default_factory=dict)
    options: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    required: tuple[str, ...]
    phases: tuple[PhaseRecord, ...]
    exports: dict[str, str] = Field(default_factory=dict)
    artifacts: tuple[ArtifactRecord, ...] = ()

    @property
    def said(self) -> str:
        """The verdict with what it leaves out: `GO for 1 of 61 checks, model changed (...)`."""
        if self.verdict is not Verdict.PARTIAL:
            return verdict_text(self.verdict, self.caveats)
        left, total = len(self.left_out()), len(set(self.required))
        much = f"{total - left} of {total - left}, {left} more were not asked for"
        return verdict_text(f"{self.verdict} {much}", self.caveats)

    @property
    def of_own_trainer(self) -> bool:
        """Was it of a trainer of one's own, without the trainer's contract?"""
        return bool(self.profile_document.get("own_trainer"))

    def of_profile(self, *names: str) -> Mapping[str, Any]:
        """A part of the profile's document, by the keys that lead to it; empty if it has none."""
        found: object = self.profile_document
        for name in names:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def left_out(self) -> tuple[str, ...]:
        """The required checks whose phases were not asked for."""
        wanted = set(self.required)
        return tuple(one.id for one in self.checks() if one.left_out and one.id in wanted)

    @property
    def given_by(self) -> dict[str, str]:
        """The source of each setting that a person gave."""
        return {name: self.sources[name] for name in self.settings if name in self.sources}

    @property
    def invocation(self) -> Invocation:
        """How the run was asked for; what an older record does not tell was not asked for."""
        told = {one.name: self.options.get(one.name) for one in fields(Invocation)} | {
            "profile": self.options.get("profile") or self.profile,
            "settings": tuple(f"{name}={value}" for name, value in self.settings.items()),
        }
        known = {name: value for name, value in told.items() if value is not None}
        return _INVOCATION.validate_python(known)

    @property
    def headline(self) -> str:
        """The verdict's first line: what it says, and what it is about."""
        return f"{self.said} ({self.scope})"

    def launches(self) -> tuple[LaunchEntry, ...]:
        """All launches, in the order of the phases."""
        return tuple(entry for phase in self.phases for entry in phase.launches)

    def checks(self) -> tuple[Check, ...]:
        """All checks, in the order of the phases."""
        return tuple(check for phase in self.phases for check in phase.checks)


@dataclass(frozen=True, kw_only=True)
class Screen:
    """How a report is shown to a person; a file is written with the defaults.

    `color`: colors are welcome. `width`: the columns of a terminal; without it no line is
    wrapped. `brief`: only what is left to say where the phases were shown while they ran; `terse`:
    of that the verdict, each cause in a line, and what to type.
    `program`: what its reader types for `runbook`.
    """

    color: bool = False
    width: int | None = None
    brief: bool = False
    terse: bool = False
    program: str = "runbook"

    def typed(self, line: str) -> str:
        """A command of the record as this reader types it."""
        return called_by(line, self.program)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command to type after a run: `when`, where it is not the first one, and what it does."""

    command: str
    when: str = ""
    does: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """One format, found through the entry points of the group `runbook.reports`.

    `file_name` is where a run keeps it; `render` is a pure function of the record, and of the
    screen if it is made for one; `following`, of a format that has it, what its reader types next.
    Raises nothing for what a record holds.
    """

    file_name: str
    render: Callable[[RunRecord, Screen], str]
    following: Callable[[RunRecord], tuple[Step, ...]] | None = None

    def text(self, record: RunRecord, screen: Screen | None = None) -> str:
        """The rendered report."""
        return self.render(record, screen or Screen())
