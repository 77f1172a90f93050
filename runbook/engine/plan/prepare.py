"""From what a person asked for to a setup that is sound, before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runbook import DEFAULT_PLAN, PROTOCOLS
from runbook.config.extends import load_preset
from runbook.config.load import load_profile
from runbook.config.phase import Phase
from runbook.config.plan import load_plan
from runbook.config.precedence import gathered, with_config, words
from runbook.config.profile import PhaseSettings
from runbook.config.registry import select
from runbook.config.settings import Settings, parse_settings, torch_variable_problems
from runbook.config.setup import RunOptions, Setup, phase_problems, with_launches
from runbook.engine.earlier.standing import asked_for, planned_profile
from runbook.engine.plan import planned_problems
from runbook.errors import UsageError, choice_for
from runbook.files import not_text
from runbook.launch.launcher_api import launcher
from runbook.machine import git
from runbook.machine.gpu import detect_profile
from runbook.machine.identity import package_folders, package_under_test


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
        names = _with_plan(standing, found, resolve)
        options = replace(options, phases=names) if names else options
    elif "profile" in found:
        resolve("phases", lambda: _selected(options.phases, found["profile"].phases))
    else:
        resolve("phases", lambda: _selected(options.phases, {}))
    if "profile" in found:
        resolve("fits", lambda: launcher(options.launcher).problems(options, found["profile"]))
        problems += found.pop("fits", [])
        problems += phase_problems(found["profile"], found.get("phases", ()))
    if options.protocol not in PROTOCOLS:
        problems.append(
            f"--protocol {options.protocol!r}: no such protocol"
            f"{choice_for(options.protocol, PROTOCOLS)}"
        )
    if "phases" in found:
        options, wrong = _with_commits(options, found["phases"])
        problems += wrong
    if not options.steps_scale > 0:
        problems.append(f"steps scale {options.steps_scale!r}: expected a number above 0")
    if problems:
        raise UsageError(problems)
    options = replace(options, settings=words(found["settings"]))
    package, path = package_under_test(), str(package_folders()["nsa"])
    setup = Setup(options=options, package=package, package_path=path, **found)
    if problems := planned_problems(setup):
        raise UsageError(problems)
    return with_launches(setup)


def _not_text(options: RunOptions) -> list[str]:
    """Words that no file of the run could repeat."""
    named = {**vars(options), "command": ""}  # the command repeats all of them
    given = [str(value) for value in named.values() if isinstance(value, str | Path)]
    given += [*options.settings, *(f"{name}={value}" for name, value in options.from_shell.items())]
    return [f"{text!r} {why}" for text in given if (why := not_text(text))]


def _known(settings: Settings) -> Settings:
    """The settings, if torch reads every name: said before a plan asks for a GO of them."""
    if problems := torch_variable_problems(settings.toggles):
        raise UsageError([f"--set {text}" for text in problems])
    return settings


def _with_plan(
    options: RunOptions,
    found: dict[str, Any],
    resolve: Callable[[str, Callable[[], object]], None],
) -> str:
    """The names of the plan's phases; its profile and phases go into `found`."""
    if not {"profile", "settings"} <= found.keys():
        return ""
    resolve("planned", lambda: planned_profile(options, found["profile"], found["settings"]))
    if "planned" not in found:
        return ""
    found["profile"], found["refused"] = found.pop("planned")
    names = ",".join(asked_for(found["profile"], options.until))
    resolve("phases", lambda: tuple(select(names, found["profile"].phases)))
    return names


def _selected(text: str, settings: Mapping[str, PhaseSettings]) -> tuple[Phase, ...]:
    """The phases of a run. Raises UsageError, also where one is meant that only a plan has."""
    try:
        return tuple(select(text, settings))
    except UsageError as error:
        problems = list(error.problems)
        for name in load_plan(DEFAULT_PLAN).phases:
            launch = f"; the plan has it: `runbook launch --until {name}`"
            problems = [
                f"{one}{launch}" if one.startswith(f"no phase {name!r}") else one
                for one in problems
            ]
        raise UsageError(problems) from error


def _with_commits(options: RunOptions, phases: Sequence[Phase]) -> tuple[RunOptions, list[str]]:
    """The options with both commits in full, and what is wrong with the names that were given.

    Without a phase that compares commits they stay as named: the command that runs another phase
    of the same run again names them too.
    """
    comparing = [phase.name for phase in phases if phase.compares_commits]
    if not comparing:
        return options, []
    checkout = git.find_checkout()
    if checkout is None:
        return options, [f"phase {comparing[0]} needs a git checkout; there is none here"]
    if not options.reference:
        return options, [f"phase {comparing[0]} needs --reference COMMIT to compare with"]
    reference, wrong = _commit(checkout, "--reference", options.reference)
    head, also = _commit(checkout, "--head", options.head or "HEAD")
    return replace(options, reference=reference, head=head), [*wrong, *also]


def _commit(checkout: Path, flag: str, name: str) -> tuple[str, list[str]]:
    """The commit in full, or as it was named with what is wrong with it."""
    sha = git.commit_of(checkout, name)
    if sha is not None:
        return sha, []
    return name, [f"{flag} {name}: no such commit in {checkout}; a shallow clone lacks older ones"]
