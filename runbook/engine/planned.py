"""Settings that cannot hold together, in any launch that a run would start.

A profile, `--set` and the arms of a phase are each sound by themselves. Only the planned launch has
them all, and the trainer would refuse it, or run without what was asked for, hours later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nsa import torch_env
from nsa.toggles import (
    NEEDS_CUDA,
    TOGGLES,
    UNAVAILABLE,
    ToggleSet,
    conflicts,
    read_values,
    toggle_set,
    with_safe_mode,
)
from runbook.records import Launch

if TYPE_CHECKING:
    from runbook.engine.options import Setup

_TYPED = "--set"
_PROFILE = "profile "


def planned_problems(setup: Setup) -> list[str]:
    """Every contradiction in the launches of this setup, by the trainer's own rules.

    Each is said once, with both settings, where they come from, the phases, and what to do. What
    an earlier phase chooses is not known yet; its arms, of which it chooses one, are.
    """
    phases: dict[str, dict[str, None]] = {}
    context = setup.context({})
    for phase in setup.phases:
        for launch in phase.plan(context):
            if launch.kind == "trainer":
                for text in _launch_problems(setup, launch):
                    phases.setdefault(text, {})[phase.name] = None
    return [f"{text} (planned in {', '.join(names)})" for text, names in phases.items()]


def _launch_problems(setup: Setup, launch: Launch) -> Iterator[str]:
    values, problems = read_values(launch.env)
    yield from problems
    yield from torch_env.plan(launch.env, uses_nccl=setup.profile.has_gpu)[1]
    given = toggle_set(values, {name: _source(setup, launch, name) for name in values})
    cuda = setup.profile.has_gpu
    yield from _toggle_problems(given, cuda=cuda)
    arms = launch.schedule.settings if launch.schedule else {}
    for arm, settings in arms.items():
        values, problems = read_values(settings)
        yield from problems
        source = f"arm {arm} of phase {launch.phase}"
        yield from _toggle_problems(with_safe_mode(given).replaced(values, source), cuda=cuda)


def _toggle_problems(toggles: ToggleSet, *, cuda: bool) -> Iterator[str]:
    for found in conflicts(toggles):
        ways = (_way_out(toggles, found.one, "0"), _way_out(toggles, found.other, found.needs))
        yield f"{found.text}: {' or '.join(ways)}"
    for name, why in UNAVAILABLE.items():
        if toggles.flag(name):
            yield (
                f"{name}=1 ({toggles.sources[name]}) can never take effect: {why}; "
                f"{_way_out(toggles, name, '0')}"
            )
    for setting, why in NEEDS_CUDA.items():
        name, _, value = setting.partition("=")
        if not cuda and toggles.values[name] == TOGGLES[name].parse(value):
            yield (
                f"{setting} ({toggles.sources[name]}): {why}, and the profile has none; "
                f"{_way_out(toggles, name, 'off' if TOGGLES[name].choices else '0')}"
            )


def _way_out(toggles: ToggleSet, name: str, harmless: str) -> str:
    """What a person changes so that a launch does not get this value."""
    source = toggles.sources[name]
    if source == _TYPED:
        return f"leave out --set {name}"
    if source.startswith(_PROFILE):
        return f"add --set {name}={harmless}"
    return f"name the phases without {source.rpartition(' ')[2]} (--phase)"


def _source(setup: Setup, launch: Launch, name: str) -> str:
    """Where a launch's variable comes from, as a person would say it."""
    profile, value = setup.profile, launch.env[name]
    if setup.settings.toggles.get(name) == value:
        return _TYPED
    for known in (profile.phases[launch.phase].env, profile.env):
        if name in known and known[name].value == value:
            return f"{_PROFILE}{profile.name}"
    return f"phase {launch.phase}"
