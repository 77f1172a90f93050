"""What a run is asked to do, and everything that follows from it before anything starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runbook.collect.detect import detect_profile
from runbook.config import (
    is_profile_file,
    load_profile,
    load_profile_document,
    parse_settings,
)
from runbook.config.precedence import gathered, with_config, words
from runbook.config.presets import load_preset
from runbook.config.settings import torch_variable_problems
from runbook.defaults import PROTOCOLS
from runbook.engine.commits import with_commits
from runbook.engine.identity import PACKAGE, PACKAGE_PATH, package_path, package_under_test
from runbook.engine.planned import planned_problems
from runbook.engine.where import place_problems
from runbook.errors import UsageError, did_you_mean
from runbook.files import is_text
from runbook.folder.names import RECORD_FILE
from runbook.records import Launch, RunRecord
from runbook.records.own_trainer import for_own
from runbook.records.phase import Phase, PlanContext
from runbook.records.run import Invocation, lasting
from runbook.registry import select

if TYPE_CHECKING:
    from runbook.config import Profile, Settings


@dataclass(frozen=True, kw_only=True)
class RunOptions(Invocation):
    """The command line of `runbook run`, as values.

    `phases` is `all` or names with commas between; `profile` a name, a file or `auto`. `shell` has
    the settings of the caller's shell, `preset` the name of one; resolved, they are in `settings`
    too. `retry` false forbids the second attempt after a stall; `keep_going` starts launches on a
    machine that preflight found wrong, and again where the same command ended badly. With a `plan`
    the phases are its own, as far as `until`. A `dry_run` only plans, so it needs no GO.
    """

    phases: str = "all"
    profile: str = "auto"
    command: str = ""
    from_shell: Mapping[str, str] = field(default_factory=dict)
    preset: str = ""
    formats: tuple[str, ...] = ("md",)
    retry: bool = True
    keep_going: bool = False
    until: str = ""
    dry_run: bool = False

    def invocation(self) -> Invocation:
        """What a command line needs to ask for the same again."""
        kept = {field.name: getattr(self, field.name) for field in fields(Invocation)}
        named = {"profile": self.profile, "plan": self.plan}
        files = {name: lasting(text) for name, text in named.items() if is_profile_file(text)}
        return Invocation(**kept | files | {"out": lasting(self.out)})

    def document(self) -> dict[str, str | int | float | bool | None]:
        """The part of the options that judging again needs, as run.json keeps it."""
        return {
            **self.invocation().options(),
            "phases": self.phases,
            "preset": self.preset,
            "retry": self.retry,
            "keep_going": self.keep_going,
            "formats": ",".join(self.formats),
        }


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Options resolved: the profile, the settings, the phases in running order.

    `planned` are their launches as far as they are known before anything ran, for estimates.
    `refused` says why the plan of a dry run would not be started.
    `package` is the digest of the package under test as the run began, `package_path` its folder.
    """

    options: RunOptions
    profile: Profile
    settings: Settings
    phases: tuple[Phase, ...]
    planned: tuple[Launch, ...] = ()
    refused: str = ""
    package: str = ""
    package_path: str = ""

    def context(self, choices: Mapping[str, str]) -> PlanContext:
        """What a phase plans and judges with, given what earlier phases chose."""
        options = self.options
        # In the words that the record keeps, so that judging again prints the same commands.
        words = tuple(f"{name}={text}" for name, text in self.settings.texts().items())
        return PlanContext(
            profile=self.profile,
            toggles=self.settings.toggles,
            config_overrides=self.settings.config_overrides,
            choices=dict(choices),
            steps_scale=options.steps_scale,
            protocol=options.protocol,
            aa=options.aa,
            seed=options.seed,
            gpu_hour_price=options.gpu_hour_price,
            reference=options.reference,
            head=options.head,
            nodes=options.nodes,
            package=self.package,
            package_path=self.package_path,
            invocation=replace(options.invocation(), settings=words),
        )

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
        return f"behind {plan.go}: its files are those that it wrote, its numbers come out again"

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

    @property
    def cuda_exports(self) -> dict[str, str]:
        """What launches set for CUDA itself, such as the visible devices."""
        return {name: text for name, text in self.exports.items() if name.startswith("CUDA_")}

    @property
    def exports(self) -> dict[str, str]:
        """The variables of every launch that can use them; no NSA_* of a trainer of one's own."""
        chosen = self.profile.variables | dict(self.settings.toggles)
        if self.profile.own_trainer is None:
            return chosen
        return for_own(chosen)

    @property
    def sources(self) -> dict[str, str]:
        """Where each of these variables, and each other setting, comes from."""
        known = dict.fromkeys(self.profile.variables, f"profile {self.profile.name}")
        return known | dict(self.settings.sources)

    @property
    def given(self) -> dict[str, str]:
        """What a person gave for this run, as text by name."""
        return self.settings.texts()

    def profile_document(self) -> dict[str, Any]:
        """The profile with nothing left to look up."""
        document: dict[str, Any] = self.profile.model_dump(mode="json")
        return document

    def profile_sha256(self) -> str:
        """The digest of that document."""
        text = json.dumps(self.profile_document(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def prepare(options: RunOptions) -> Setup:
    """Resolve the options and plan every phase, which starts nothing.

    Raises `UsageError` with everything that is wrong with the options; only sound ones are planned,
    and then with every contradiction in a planned launch.
    """
    problems = _not_text(options)
    found: dict[str, Any] = {}
    named = options.profile != "auto"

    def resolve(key: str, read: Callable[[], object]) -> None:
        try:
            found[key] = read()
        except UsageError as error:
            problems.extend(f"{t}; {error.hint}" if error.hint else t for t in error.problems)

    resolve("profile", lambda: load_profile(options.profile if named else detect_profile()[0]))
    resolve("settings", lambda: _known(parse_settings(options.settings)))
    resolve("preset", lambda: load_preset(options.preset) if options.preset else None)
    preset = found.pop("preset", None)
    if {"profile", "settings"} <= found.keys():
        given = {"shell": options.from_shell, "preset": preset}
        profile, typed = found["profile"], found["settings"]
        resolve("settings", lambda: gathered(profile, typed, **given))
        found["profile"] = with_config(profile, found["settings"].config)
    if options.plan:
        # A GO is asked for only once the rest is right: it has to be one of these settings.
        standing = options if not problems else replace(options, without_go=True)
        names = _with_plan(standing, found, resolve, problems)
        options = replace(options, phases=names) if names else options
    elif "profile" in found:
        resolve("phases", lambda: tuple(select(options.phases, found["profile"].phases)))
    else:
        resolve("phases", lambda: tuple(select(options.phases)))
    if "profile" in found:
        problems += place_problems(options, found["profile"])
        problems += _without_settings(found["profile"], found.get("phases", ()))
    if options.protocol not in PROTOCOLS:
        problems.append(
            f"--protocol {options.protocol!r}: no such protocol"
            f"{did_you_mean(options.protocol, PROTOCOLS)}; there are: {', '.join(PROTOCOLS)}"
        )
    if "phases" in found:
        options, wrong = with_commits(options, found["phases"])
        problems += wrong
    if not options.steps_scale > 0:
        problems.append(f"steps scale {options.steps_scale!r}: expected a number above 0")
    if problems:
        raise UsageError(problems)
    options = replace(options, settings=words(found["settings"]))
    package, path = package_under_test(), package_path()
    setup = Setup(options=options, package=package, package_path=path, **found)
    if problems := planned_problems(setup):
        raise UsageError(problems)
    return with_launches(setup)


def _not_text(options: RunOptions) -> list[str]:
    """Words that no file of the run could repeat."""
    named = {**vars(options), "command": ""}  # the command repeats all of them
    given = [str(value) for value in named.values() if isinstance(value, str | Path)]
    given += [*options.settings, *(f"{name}={value}" for name, value in options.from_shell.items())]
    return [
        f"{text!r} is not UTF-8 text, and a run's files are" for text in given if not is_text(text)
    ]


def _known(settings: Settings) -> Settings:
    """The settings, if torch reads every name: said before a plan asks for a GO of them."""
    if problems := torch_variable_problems(settings.toggles):
        raise UsageError([f"--set {text}" for text in problems])
    return settings


def _with_plan(
    options: RunOptions,
    found: dict[str, Any],
    resolve: Callable[[str, Callable[[], object]], None],
    problems: list[str],
) -> str:
    """The names of the plan's phases; its profile and phases go into `found`."""
    from runbook.engine.launching import asked_for, planned_profile

    if not {"profile", "settings"} <= found.keys():
        return ""
    resolve("planned", lambda: planned_profile(options, found["profile"], found["settings"]))
    if "planned" not in found:
        return ""
    found["profile"], refused = found.pop("planned")
    if refused and not options.dry_run:
        problems.append(refused)
    found["refused"] = refused
    names = ",".join(asked_for(found["profile"], options.until))
    resolve("phases", lambda: tuple(select(names, found["profile"].phases)))
    return names


def with_launches(setup: Setup) -> Setup:
    """The setup with the launches of its phases."""
    context = setup.context({})
    launches = tuple(launch for phase in setup.phases for launch in phase.plan(context))
    return replace(setup, planned=launches)


def _without_settings(profile: Profile, phases: tuple[Phase, ...]) -> list[str]:
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
    before = Invocation.recorded(record.profile, record.settings, kept)
    asked = vars(before) | {"profile": named or (profile.name if profile else before.profile)}
    options = RunOptions(
        **asked,
        phases=str(kept["phases"]),
        command=record.command,
        formats=tuple(str(kept["formats"]).split(",")) if kept["formats"] else (),
        retry=bool(kept["retry"]),
        keep_going=bool(kept.get("keep_going")),
    )
    profile = profile or load_profile_document(record.profile_document, where=RECORD_FILE)
    phases = tuple(select(options.phases, profile.phases))
    if problems := _without_settings(profile, phases):
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


def setup_to_resume(record: RunRecord) -> Setup:
    """The setup of a run that goes on, with its plan."""
    return with_launches(setup_of_record(record))


def plan_all(options: RunOptions) -> list[tuple[Phase, list[Launch]]]:
    """The plan of every phase, as far as it is known before anything ran.

    A phase that uses another one's choice (the long run takes the best bucket) is shown with the
    profile's own value. Starts nothing, writes nothing. Raises `UsageError`.
    """
    return prepare(options).plan()
