"""Phases and reports, found through entry points; the shipped ones like any other.

A package that installs an entry point in the group `runbook.phases` or `runbook.reports` adds a
phase or a report. Nothing here names one, so the engine depends on none. `runbook.kinds` has what a
plan makes its own phases from. Where launches run, `runbook.launch.launcher_api` finds so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.checkout import DISTRIBUTION, HOME, uninstalled
from runbook.config.phase import Made, Phase, PlanContext
from runbook.errors import RunbookError, UsageError, choice_for
from runbook.records.run import Report

if TYPE_CHECKING:
    from runbook.config import LimitSpec, PhaseSettings, Profile, Stage

PHASE_GROUP = "runbook.phases"
REPORT_GROUP = "runbook.reports"
KIND_GROUP = "runbook.kinds"
# The order of a phase that a plan makes: after every installed one.
_MADE_FROM = 10_000


@lru_cache(maxsize=1)
def phases() -> Mapping[str, Phase]:
    """Every installed phase by name, in running order. Raises RunbookError (see `in_order`)."""
    return in_order([entry.load()() for entry in installed(PHASE_GROUP)])


@lru_cache(maxsize=1)
def kinds() -> Mapping[str, type[Made]]:
    """What a plan can make phases from, by the name that it says in `kind`."""
    return {entry.name: entry.load() for entry in installed(KIND_GROUP)}


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
    return {entry.name: entry.load() for entry in installed(REPORT_GROUP)}


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
    """The entry points of a group, none twice, all from where their distribution is.

    Raises RunbookError if there is none, if a name comes twice, or if a folder of the same name
    hides one of our packages: its code would run in place of this program's.
    """
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
    ours = {entry.module.partition(".")[0] for entry in found if _owner(entry) == DISTRIBUTION}
    problems += [text for package in sorted(ours) if (text := _hidden(package))]
    if problems:
        raise RunbookError("; ".join(problems))
    return tuple(found)


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


def _hidden(package: str) -> str:
    """What hides a package of ours, without running it; an empty text if nothing does."""
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    if any(Path(place).resolve().parent == HOME for place in places[:1]):
        return ""
    where = places[0] if places else "nowhere"
    return (
        f"package {package!r} comes from {where}, not from {HOME}; start `runbook` outside that "
        "folder and without PYTHONPATH, or reinstall nsa-runbook in a virtual environment"
    )


def report_files() -> dict[str, str]:
    """The file that a run keeps of each format, by the format's name."""
    return {name: report.file_name for name, report in reports().items()}
