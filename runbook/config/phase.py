"""The contract of a phase: `plan` says what will run, `judge` says what it means. Both are pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from runbook import DEFAULT_LAUNCHER
from runbook.records import Check, Launch, Measurement, Series, Table
from runbook.records.evidence import PhaseEvidence, TrainingLog
from runbook.records.run import Asked, Invocation

if TYPE_CHECKING:
    from runbook.config import FixedRule, LimitSpec, Profile, Stage


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
