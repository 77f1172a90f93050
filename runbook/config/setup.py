"""What a run is asked to do, and that resolved: a profile, settings and phases, as plain values.

Nothing here starts, reads or looks for anything; `runbook.engine.plan.prepare` resolves what a
person asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from runbook import FILE_AFTER
from runbook.config import Profile
from runbook.config.extends import read_mapping, validated
from runbook.config.load import load_profile_document
from runbook.config.precedence import with_config
from runbook.config.registry import Phase, PlanContext, select
from runbook.config.settings import Settings, parse_settings
from runbook.errors import UsageError
from runbook.files import data_path, is_file
from runbook.records import Launch, RunRecord
from runbook.records.invocation import Asked, Invocation, lasting
from runbook.records.measurement import Record
from runbook.records.own_trainer import for_own
from runbook.records.run import PACKAGE, PACKAGE_PATH


@dataclass(frozen=True, kw_only=True)
class RunOptions(Invocation):
    """The command line of `runbook run`, as values.

    `phases` is `all` or names with commas between; `profile` a name, a file or `auto`. `shell` has
    the settings of the caller's shell, `preset` the name of one; resolved, they are in `settings`
    too. `retry` false forbids the second attempt after a stall; `keep_going` starts launches on a
    machine that preflight found wrong, and again where the same command ended badly. With a `plan`
    the phases are its own, as far as `until`.
    """

    phases: str = "all"
    profile: str = "auto"
    command: str = ""
    from_shell: Mapping[str, str] = field(default_factory=dict)
    preset: str = ""
    retry: bool = True
    keep_going: bool = False
    until: str = ""

    def invocation(self) -> Invocation:
        """What a command line needs to ask for the same again."""
        kept = {field.name: getattr(self, field.name) for field in fields(Invocation)}
        named = {"profile": self.profile, "plan": self.plan}
        files = {name: lasting(text) for name, text in named.items() if is_file(text)}
        kind, colon, path = self.launcher.partition(FILE_AFTER)
        files |= {"launcher": f"{kind}{FILE_AFTER}{lasting(path)}"} if colon else {}
        return Invocation(**kept | files | {"out": lasting(self.out)})

    def document(self) -> dict[str, str | int | float | bool | None]:
        """The part of the options that judging again needs, as run.json keeps it."""
        return {
            **self.invocation().options(),
            "phases": self.phases,
            "preset": self.preset,
            "retry": self.retry,
            "keep_going": self.keep_going,
        }


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Options resolved: the profile, the settings, the phases in running order.

    `refused` says why the plan may not be started; it can still be shown.
    `package` is the digest of the package under test as the run began, `package_path` its folder.
    """

    options: RunOptions
    profile: Profile
    settings: Settings
    phases: tuple[Phase, ...]
    refused: str = ""
    package: str = ""
    package_path: str = ""

    def context(self, choices: Mapping[str, str]) -> PlanContext:
        """What a phase plans and judges with, given what earlier phases chose."""
        options = self.options
        return PlanContext(
            profile=self.profile,
            toggles=self.settings.toggles,
            config_overrides=self.settings.config_overrides,
            choices=dict(choices),
            **{one.name: getattr(options, one.name) for one in fields(Asked)},
            package=self.package,
            package_path=self.package_path,
            # In the words that the record keeps, so that judging again prints the same commands.
            invocation=replace(options.invocation(), settings=self.settings.words()),
        )

    @property
    def phases_by_name(self) -> dict[str, Phase]:
        """The phases in running order, each under its name."""
        return {phase.name: phase for phase in self.phases}

    @property
    def stops(self) -> bool:
        """Does nothing start behind a phase that did not pass?"""
        return self.profile.plan is not None and self.profile.plan.stops

    @property
    def standing(self) -> str:
        """Behind which run its plan starts, and that this one was looked at; empty if none."""
        plan = self.profile.plan
        if plan is None or not plan.go:
            return ""
        return f"behind {plan.go}: its files are unchanged and its numbers recompute to the same"

    @property
    def required(self) -> tuple[str, ...]:
        """What a GO needs: the profile's checks, and all of a phase that was asked for by name
        and of which the profile requires none."""
        named = {name.strip() for name in self.options.phases.split(",")}
        decided = {check.partition(".")[0] for check in self.profile.required}
        extra = [
            check
            for phase in self.phases
            if phase.name in named - decided
            for check in phase.check_ids(self.context({}))
        ]
        context = self.context({})
        of_nodes = [check for phase in self.phases for check in phase.needed_on_nodes(context)]
        return tuple(dict.fromkeys((*self.profile.required, *extra, *of_nodes)))

    def plan(self) -> list[tuple[Phase, list[Launch]]]:
        """Each phase with its launches, as far as they are known before anything ran."""
        context = self.context({})
        return [(phase, phase.plan(context)) for phase in self.phases]

    @cached_property
    def planned(self) -> tuple[Launch, ...]:
        """These launches."""
        return tuple(launch for _, launches in self.plan() for launch in launches)

    @property
    def cuda_exports(self) -> dict[str, str]:
        """What launches set for CUDA itself, such as the visible devices."""
        return {name: text for name, text in self.exports.items() if name.startswith("CUDA_")}

    @property
    def exports(self) -> dict[str, str]:
        """The variables of every launch that can use them; no NSA_* of a trainer of one's own."""
        chosen = self.profile.variables | dict(self.settings.toggles)
        own = self.profile.own_trainer
        return chosen if own is None else {**for_own(chosen), **own.env}

    @property
    def sources(self) -> dict[str, str]:
        """Where each of these variables, and each other setting, comes from."""
        own = self.profile.own_trainer
        names = (*self.profile.variables, *(own.env if own else ()))
        known = dict.fromkeys(names, f"profile {self.profile.name}")
        return known | dict(self.settings.sources)

    def profile_document(self) -> dict[str, Any]:
        """The profile with nothing left to look up."""
        return self.profile.model_dump(mode="json")

    def profile_sha256(self) -> str:
        """The digest of that document."""
        text = json.dumps(self.profile_document(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def phase_problems(profile: Profile, phases: Sequence[Phase]) -> list[str]:
    """The phases of which the profile says nothing, each in a line."""
    known = ", ".join(profile.phases)
    return [
        f"profile {profile.name} says nothing of phase {phase.name}; it has: {known}"
        for phase in phases
        if phase.name not in profile.phases
    ]


def setup_of_record(record: RunRecord, *, profile: Profile | None = None, named: str = "") -> Setup:
    """The setup of an earlier run, from its record alone.

    `profile` replaces the one it used; `named` is how a person names that one.
    """
    kept = record.options
    before = record.invocation
    asked = vars(before) | {"profile": named or (profile.name if profile else before.profile)}
    options = RunOptions(
        **asked,
        phases=str(kept["phases"]),
        command=record.command,
        retry=bool(kept["retry"]),
        keep_going=bool(kept.get("keep_going")),
    )
    profile = profile or load_profile_document(
        record.profile_document, where=f"profile of {record.run_id}"
    )
    phases = tuple(select(options.phases, profile.phases))
    if problems := phase_problems(profile, phases):
        raise UsageError(problems)
    settings = replace(parse_settings(options.settings), sources=record.given_by)
    profile = with_config(profile, settings.config)
    return Setup(
        options=options,
        profile=profile,
        settings=settings,
        phases=phases,
        package=record.environment.get(PACKAGE, ""),
        package_path=record.environment.get(PACKAGE_PATH, ""),
    )


class Nightly(Record):
    """What the nightly compares with, changed by hand: a commit in full, the profile, and why."""

    schema_version: Literal[1]
    reference: str = Field(pattern=r"^[0-9a-f]{40}$")
    profile: str = Field(min_length=1)
    why: str = Field(min_length=1)


def load_nightly() -> Nightly:
    """The shipped pin. Raises UsageError with everything that is wrong."""
    path = data_path("configs") / "nightly.yaml"
    return validated(Nightly, read_mapping("nightly", path), str(path))
