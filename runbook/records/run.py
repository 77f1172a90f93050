"""`run.json`: everything a report says, and nothing it does not; and the contract of a report.

How the run was asked for is kept there too: every `runbook run` line that is printed (a row's
rerun, a remedy, the dry run's) is made here, so that none drops a setting and starts another
experiment.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter

from runbook import DEFAULT_LAUNCHER, DEFAULT_OUT, DEFAULT_PLAN, DEFAULT_PROTOCOL, DEFAULT_QUEUE_S
from runbook.errors import called_by, verdict_text
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


# What takes a node out of the cluster that the run was on, by its launcher (`takes_out`).
TAKES_OUT = "takes_out"


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


# Options in the order in which a command has them.
_PRINTED = (
    *("protocol", "steps_scale", "seed", "out", "reference", "head", "launcher", "nodes"),
    *("partition", "account", "queue_s", "gpu_hour_price"),
)
_OF_A_CLUSTER = ("launcher", "nodes", "partition", "account", "queue_s")
# The fact that has the nodes of a run by name, with a comma between.
NODE_NAMES = "nodes.names"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What of an invocation a phase plans and judges with.

    `steps_scale` multiplies every step count. `gpu_hour_price` is the price of one device for one
    hour, in any currency. `reference` and `head` are commits. The ranks are spread over `nodes`.
    """

    protocol: str = DEFAULT_PROTOCOL
    steps_scale: float = 1.0
    aa: bool = False
    seed: int = 0
    gpu_hour_price: float | None = None
    reference: str = ""
    head: str = ""
    nodes: int = 1


@dataclass(frozen=True, kw_only=True)
class Invocation(Asked):
    """Everything of a `runbook run` that changes what is measured or where it goes.

    `profile` is a name, or the path of a file; a path is kept absolute, since the line may be
    pasted anywhere. `settings` are `KEY=VALUE` words. `plan`, a name or the path of a file, makes
    it a `runbook launch`, with `without_go`. `launcher` is where launches run: on this machine, or
    on nodes of a cluster, of which the last three and `nodes` speak.
    """

    profile: str
    settings: tuple[str, ...] = ()
    out: str | Path = DEFAULT_OUT
    plan: str = ""
    without_go: bool = False
    launcher: str = DEFAULT_LAUNCHER
    partition: str = ""
    account: str = ""
    queue_s: float = DEFAULT_QUEUE_S

    def options(self) -> dict[str, str | int | float | bool | None]:
        """The part that run.json keeps under `options`; the settings have a place of their own."""
        kept = {name: value for name, value in asdict(self).items() if name != "settings"}
        # A run that follows no plan says nothing of plans, one on this machine nothing of clusters.
        unsaid = [name for name in ("plan", "without_go") if not kept[name]]
        unsaid += _OF_A_CLUSTER if self.launcher == DEFAULT_LAUNCHER else ()
        return {name: value for name, value in kept.items() if name not in unsaid}

    def adding(self, settings: Iterable[str]) -> Invocation:
        """The same with these `KEY=VALUE` words, in the place of what was given by that name."""
        more = tuple(settings)
        names = {text.partition("=")[0] for text in more}
        kept = [text for text in self.settings if text.partition("=")[0] not in names]
        return replace(self, settings=(*kept, *more))

    def line(self, phases: Iterable[str] = ()) -> str:
        """The command that runs these phases in the same way, or all; it leaves out defaults.

        A plan is run from its beginning: a phase of it means nothing without those before it.
        """
        words = [*self.program, *self._named(phases), "--profile", self.profile]
        if self.plan:
            words += [] if self.plan == DEFAULT_PLAN else ["--plan", self.plan]
            words += ["--without-go"] if self.without_go else []
        words += [word for setting in self.settings for word in ("--set", setting)]
        plain = Invocation(profile=self.profile)
        for name in _PRINTED:
            value, default = (_text(getattr(one, name)) for one in (self, plain))
            words += [f"--{name.replace('_', '-')}", value] if value != default else []
        return shlex.join([*words, *(["--aa"] if self.aa else [])])

    def _named(self, phases: Iterable[str]) -> list[str]:
        """The words that name these phases; none of all."""
        named = list(phases)
        if not named:
            return []
        return ["--until", named[-1]] if self.plan else ["--phase", ",".join(named)]

    def production_line(self) -> str:
        """The launch by the shipped plan that starts production behind a GO of this run."""
        plain = Invocation(profile=self.profile)
        asked = replace(self, plan=DEFAULT_PLAN, protocol=plain.protocol, aa=plain.aa)
        return replace(asked, seed=plain.seed, reference="", head="").line()

    @property
    def program(self) -> tuple[str, str]:
        """The command that begins such a run, and goes on with it."""
        return ("runbook", "launch" if self.plan else "run")

    def resume_line(self, run_id: str, phases: Iterable[str] = ()) -> str:
        """The command that goes on with this run, or adds phases to it."""
        words = [*self.program, "--resume", run_id, *self._named(phases)]
        words += [] if str(self.out) == DEFAULT_OUT else ["--out", str(self.out)]
        return shlex.join(words)


_INVOCATION = TypeAdapter(Invocation)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def edited(line: str, *, without: Iterable[str]) -> str:
    """A printed line of an invocation without these settings.

    A line in which there is nothing to change, or that is none, stays as it is.
    """
    try:
        whole = shlex.split(line)
    except ValueError:
        return line
    names, words, kept = set(without), iter(whole), []
    for word in words:
        value = next(words, "") if word == "--set" else ""
        if word != "--set":
            kept.append(word)
        elif value.partition("=")[0] not in names:
            kept += [word, value]
    return line if kept == whole else shlex.join(kept)


def lasting(path: str | Path) -> str:
    """A path that works wherever the line is pasted; the default folder stays as it is."""
    return str(path) if str(path) == DEFAULT_OUT else str(Path(path).absolute())
