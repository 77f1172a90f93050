"""The contract of a phase, and how phases and reports are found: the shipped ones like any other.

Of a phase, `plan` says what will run, `judge` says what it means. Both are pure.

A package that installs an entry point in the group `runbook.phases` or `runbook.reports` adds a
phase or a report. Nothing here names one, so the engine depends on none. `runbook.kinds` has what a
plan makes its own phases from. Where launches run, `runbook.launch.launcher_api` finds so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any, ClassVar

from runbook import DEFAULT_LAUNCHER
from runbook.checkout import DISTRIBUTION, HOME, uninstalled
from runbook.config import FixedRule, LimitSpec, PhaseSettings, Profile, Stage
from runbook.errors import RunbookError, UsageError, choice_for
from runbook.records import Check, Launch, Measurement, Series, Table
from runbook.records.evidence import PhaseEvidence, TrainingLog
from runbook.records.invocation import Asked, Invocation
from runbook.records.run import Report

PHASE_GROUP = "runbook.phases"
REPORT_GROUP = "runbook.reports"
KIND_GROUP = "runbook.kinds"
# The order of a phase that a plan makes: after every installed one.
_MADE_FROM = 10_000


@dataclass(frozen=True, kw_only=True)
class PlanContext(Asked):
    """Everything a plan depends on.

    `toggles` and `config_overrides` come from `--set`; `choices` are toggles that earlier phases
    chose (the best bucket), by the name of the toggle. `invocation` is how the run was asked for,
    for the commands that ask for it again. `reference` and `head` are in full. `package` is the
    digest of the package under test as the run began, `package_path` the folder that the harness
    has it from; each is empty where that is not known.
    """

    profile: Profile
    toggles: Mapping[str, str] = field(default_factory=dict)
    config_overrides: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    package: str = ""
    package_path: str = ""
    invocation: Invocation | None = None

    @property
    def on_nodes(self) -> bool:
        """Do the launches run on nodes of a cluster?"""
        return self.invocation is not None and self.invocation.launcher != DEFAULT_LAUNCHER

    def rerun(self, *phases: str, adding: Sequence[str] = ()) -> str:
        """The command that runs these phases again in the same way, or with settings more."""
        asked = self.invocation or Invocation(profile=self.profile.name)
        return asked.adding(adding).line(phases)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a phase says about its evidence.

    `remedies` and `first_commands` are those of `PhaseRecord`.
    """

    checks: Sequence[Check] = ()
    measurements: Sequence[Measurement] = ()
    tables: Sequence[Table] = ()
    series: Sequence[Series] = ()
    choices: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    remedies: Mapping[str, str] = field(default_factory=dict)
    first_commands: Mapping[str, str] = field(default_factory=dict)


class Phase(ABC):
    """One section of the runbook.

    `order` is its place in the running order (the shipped phases are 10 apart). `reads` names the
    phases whose choices or evidence this one uses, if they ran; `limits` declares what the profile
    has to set for it, `fixed` what is the same on every machine; `arms_toggle` is the toggle whose
    values the profile's `arms` are; `collects` asks the engine to run the collectors before the
    launches (preflight only); `remembers` asks it to keep, beside the launches, what accepted runs
    measured in the same phase. `compares_commits`: it plans with a reference and a head commit.
    `guards`: unless each of its required rows passes, later phases start nothing, because their
    numbers would mean nothing.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    question: ClassVar[str]
    order: ClassVar[int]
    reads: ClassVar[tuple[str, ...]] = ()
    limits: ClassVar[tuple[LimitSpec, ...]] = ()
    fixed: ClassVar[tuple[FixedRule, ...]] = ()
    arms_toggle: ClassVar[str] = ""
    optional: ClassVar[bool] = False
    collects: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    compares_commits: ClassVar[bool] = False
    guards: ClassVar[bool] = False

    @abstractmethod
    def plan(self, context: PlanContext) -> list[Launch]:
        """The launches of this phase, in order. Pure: no clock, no files, no processes."""

    @abstractmethod
    def judge(self, evidence: PhaseEvidence, context: PlanContext) -> Judgement:
        """Checks, tables and choices from the evidence. Pure.

        Every check id that the phase can require is in the result whatever is missing.
        """

    @abstractmethod
    def check_ids(self, context: PlanContext) -> tuple[str, ...]:
        """The ids of all rows that `judge` returns, so that no row can vanish."""

    def own_checks(self, context: PlanContext) -> tuple[str, ...]:  # noqa: ARG002
        """Ids of the checks that a trainer of one's own can answer. Pure."""
        return ()

    def needed_on_nodes(self, context: PlanContext) -> tuple[str, ...]:  # noqa: ARG002
        """Ids of the checks that a GO on nodes of a cluster needs beside the profile's. Pure."""
        return ()

    def excluded(self, context: PlanContext) -> str:  # noqa: ARG002
        """Why the settings given leave it nothing to do; it then plans nothing. Pure.

        Whoever names it is refused; in a run of all phases its rows are SKIPPED with this reason.
        """
        return ""

    def compares(self, context: PlanContext) -> Mapping[str, str]:  # noqa: ARG002
        """The toggles that its arms decide, as the arm has them that stands for all other phases.

        Whoever gives one of them another value is refused: the phase could not have it. Pure.
        """
        return {}

    def enough(self, log: TrainingLog, launch: Launch, context: PlanContext) -> bool:  # noqa: ARG002
        """May a scheduled launch stop after the blocks in `log`? Pure; asked after each block."""
        return False

    def needs_more(
        self,
        evidence: PhaseEvidence,  # noqa: ARG002
        context: PlanContext,  # noqa: ARG002
    ) -> Sequence[str]:
        """Names of the conditional launches that start next, in the plan's order.

        Pure; asked again with what they left, until it names none that has not run.
        """
        return ()


class Made(Phase):
    """A phase that a plan makes: a kind (this class) with what the plan says of it (`stage`).

    A kind is found through the entry points of the group `runbook.kinds`.
    """

    stage: ClassVar[Stage]

    @classmethod
    @abstractmethod
    def known_checks(cls) -> tuple[str, ...]:
        """What a plan may name in `checks`."""

    @abstractmethod
    def needed(self, profile: Profile) -> tuple[str, ...]:
        """Ids of the checks that a GO needs on this machine: those that it can answer."""


@lru_cache(maxsize=1)
def phases() -> Mapping[str, Phase]:
    """Every installed phase by name, in running order. Raises RunbookError (see `in_order`)."""
    return in_order([loaded(entry)() for entry in installed(PHASE_GROUP)])


@lru_cache(maxsize=1)
def kinds() -> Mapping[str, type[Made]]:
    """What a plan can make phases from, by the name that it says in `kind`."""
    return {entry.name: loaded(entry) for entry in installed(KIND_GROUP)}


def phases_of(settings: Mapping[str, PhaseSettings]) -> Mapping[str, Phase]:
    """Every installed phase, and those that a plan made, in running order.

    `settings` are a profile's. Raises RunbookError as `in_order` does.
    """
    made = [_made(name, one, one.stage) for name, one in settings.items() if one.stage is not None]
    return in_order([*phases().values(), *made]) if made else phases()


def _made(name: str, settings: PhaseSettings, stage: Stage) -> Phase:
    """The phase, as a class of its own: its name and title belong to its class."""
    if stage.kind not in kinds():
        raise RunbookError(f"no kind of phase {stage.kind!r}; there are: {', '.join(kinds())}")
    kind = kinds()[stage.kind]
    said = {
        "name": name,
        "title": stage.title,
        "question": f"{stage.title}: does it pass its gate?",
        "source": settings.source,
        "order": _MADE_FROM + stage.order,
        "stage": stage,
    }
    made: Phase = type(f"{kind.__name__}_{name}", (kind,), said)()
    return made


def standard_phases() -> list[str]:
    """What `--phase all` runs, and every profile names: the shipped phases that are not optional.

    A phase of another package runs when it is named, under a profile that has settings for it, so
    that installing a package changes no verdict.
    """
    ours = {entry.name for entry in installed(PHASE_GROUP) if _owner(entry) == DISTRIBUTION}
    return [name for name, phase in phases().items() if not phase.optional and name in ours]


def in_order(found: Iterable[Phase]) -> dict[str, Phase]:
    """Phases by name, sorted by their `order`.

    Raises RunbookError if a name comes twice, or if a phase reads one that does not run before it.
    """
    table: dict[str, Phase] = {}
    for phase in sorted(found, key=lambda one: (one.order, one.name)):
        if phase.name in table:
            homes = " and ".join(type(one).__module__ for one in (table[phase.name], phase))
            raise RunbookError(f"two phases are called {phase.name!r}: {homes}; uninstall one")
        unknown = [name for name in phase.reads if name not in table]
        if unknown:
            raise RunbookError(
                f"{phase.name} reads {', '.join(unknown)}, which do not run before it"
            )
        table[phase.name] = phase
    return table


@lru_cache(maxsize=1)
def reports() -> Mapping[str, Report]:
    """Every installed report by the name that `--format` takes."""
    return {entry.name: loaded(entry) for entry in installed(REPORT_GROUP)}


def names(group: str) -> tuple[str, ...]:
    """The names of a group, such as `--format` takes, without loading any of them."""
    return tuple(entry.name for entry in installed(group))


def select(text: str, settings: Mapping[str, PhaseSettings] | None = None) -> list[Phase]:
    """Phases of `all` (see `standard_phases`), of `a,b`, or of `all,a`, in running order.

    `settings` are the profile's, where it has phases that a plan made.

    Raises UsageError that lists every unknown, empty or repeated name.
    """
    known = phases_of(settings or {})
    names = [name.strip() for name in text.split(",")]
    standard = standard_phases()
    if "all" in names:
        names = [*standard, *(name for name in names if name != "all" and name not in standard)]
    there = ("all", *known)
    problems = [
        f"no phase {name!r}{choice_for(name, there)}"
        for name in dict.fromkeys(names)
        if name not in known
    ]
    problems += [f"phase {name!r} is named twice" for name in known if names.count(name) > 1]
    if problems:
        raise UsageError(problems)
    return [phase for name, phase in known.items() if name in names]


def known_checks(profile: Profile) -> tuple[str, ...]:
    """Ids of all checks that the phases of this profile can give."""
    context = PlanContext(profile=profile)
    return tuple(check for phase in _phases_in(profile) for check in phase.check_ids(context))


def own_checks(profile: Profile) -> tuple[str, ...]:
    """Ids of the checks that this profile's own trainer can answer."""
    context = PlanContext(profile=profile)
    return tuple(check for phase in _phases_in(profile) for check in phase.own_checks(context))


def _phases_in(profile: Profile) -> list[Phase]:
    """The phases for which the profile has settings."""
    return [phase for name, phase in phases_of(profile.phases).items() if name in profile.phases]


def known_limits(
    names: Iterable[str], settings: Mapping[str, PhaseSettings] | None = None
) -> dict[str, LimitSpec]:
    """The limits that the phases of these names read, in the order of the phases.

    `settings` as in `select`. Raises RunbookError if two phases declare different limits under one
    name.
    """
    wanted = set(names)
    table: dict[str, LimitSpec] = {}
    for phase in phases_of(settings or {}).values():
        for spec in phase.limits if phase.name in wanted else ():
            if table.setdefault(spec.name, spec) != spec:
                raise RunbookError(f"two limits are called {spec.name!r}; {phase.name} has one")
    return table


@lru_cache(maxsize=8)
def installed(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group. Raises RunbookError if there is none, or one comes twice."""
    found = _entry_points(group)
    if not found:
        raise RunbookError(
            f"no entry points in the group {group!r}: nsa-runbook is not installed here, and "
            f"{HOME} has no pyproject.toml that declares some; install it, in a checkout with "
            "`pip install -e .`"
        )
    problems = []
    for name in dict.fromkeys(entry.name for entry in found):
        same = [entry for entry in found if entry.name == name]
        if len(same) > 1:
            homes = " and ".join(f"{_owner(entry)} ({entry.value})" for entry in same)
            problems.append(f"{group} {name!r} is installed twice: {homes}; uninstall one")
    if problems:
        raise RunbookError("; ".join(problems))
    return tuple(found)


def loaded(entry: EntryPoint) -> Any:
    """What an entry point names. Raises RunbookError, with whose it is, where that is not there."""
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        what = f"{entry.group} {entry.name!r} of {_owner(entry)} ({entry.value})"
        raise RunbookError(f"{what} cannot be loaded: {error}; correct or uninstall it") from error


def _entry_points(group: str) -> list[EntryPoint]:
    """Those of every installed package; ours are a checkout's own if that is what runs."""
    found = list(entry_points(group=group))
    checkout = uninstalled()
    if checkout is None:
        return found
    others = [entry for entry in found if _owner(entry) != DISTRIBUTION]
    return [*others, *checkout.entry_points.select(group=group)]


def _owner(entry: EntryPoint) -> str:
    return _name_of(entry.dist) if entry.dist is not None else "?"


@lru_cache(maxsize=256)
def _name_of(distribution: Distribution) -> str:
    """Its name, for which its whole METADATA is read."""
    return str(distribution.name)


def report_files() -> dict[str, str]:
    """The file that a run keeps of each format, by the format's name."""
    return {name: report.file_name for name, report in reports().items()}
