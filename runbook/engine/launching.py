"""From the command line of `runbook launch` to the profile that everything is planned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nsa.contract import NSAError
from nsa.settings import load_config
from runbook.config.extends import is_file
from runbook.config.plan import load_plan, needing_go, with_plan, without_board
from runbook.config.precedence import words
from runbook.config.profile import Profile
from runbook.config.settings import Settings
from runbook.engine.standing import Standing, find_standing
from runbook.errors import UsageError, did_you_mean
from runbook.launch.command import resolve_config

if TYPE_CHECKING:
    from runbook.config.setup import RunOptions


def planned_profile(
    options: RunOptions, profile: Profile, settings: Settings
) -> tuple[Profile, str]:
    """The machine's profile with the plan, its config and the accepted run behind it.

    And why it must not start: a phase that needs a GO is asked for and none is found; else empty.
    Raises UsageError for a plan or a config that does not fit.
    """
    if own := profile.own_trainer:
        raise UsageError(
            f"plan {options.plan}: {own.name} is a trainer of your own; a plan needs the trainer's "
            "contract, by which a phase goes on from the one before"
        )
    if settings.config:
        profile = _with_workload(profile, settings.config)
    plan = without_board(load_plan(options.plan, has_gpu=profile.has_gpu))
    named = not is_file(options.plan)
    known = with_plan(profile, plan, shipped=named)
    asked = asked_for(known, options.until)
    found, refused = Standing(), ""
    if not options.without_go:
        needing = needing_go(known, asked)
        phases = [known.phases[name] for name in needing]
        found = find_standing(
            Path(options.out), profile, settings, phases, steps_scale=options.steps_scale
        )
        if not found.run_id and needing:
            given = replace(options, settings=words(settings))
            refused = _refusal(given, needing, asked, found)
    chosen = {name: v for name, v in found.chosen.items() if name not in settings.toggles}
    go = f"{found.run_id}: {found.said}" if found.run_id else ""
    planned = with_plan(
        profile, plan, shipped=named, chosen=chosen, go=go, parameters=found.parameters
    )
    return planned, refused


def _with_workload(profile: Profile, config: str) -> Profile:
    """The profile with the workload that another config trains."""
    try:
        train = load_config(resolve_config(config)).config
    except NSAError as error:
        raise UsageError([f"CONFIG={config}: {text}" for text in error.problems]) from error
    workload = profile.workload.model_copy(
        update={
            "seq_len": train.train.seq_len,
            "global_batch": train.train.batch_size,
            "accumulation": train.train.accumulate_grad_batches,
            "dtype": train.runtime.precision,
            "source": f"CONFIG={config}",
        }
    )
    return profile.model_copy(update={"workload": workload})


def asked_for(profile: Profile, until: str) -> tuple[str, ...]:
    """The plan's phases as far as `until`, all without it. Raises UsageError for an unknown one."""
    names = profile.plan.phases if profile.plan else ()
    if until and until not in names:
        near = did_you_mean(until, names)
        raise UsageError(f"--until {until}: no such phase in the plan{near}; {_there(names)}")
    return names[: names.index(until) + 1] if until else names


def _there(names: Sequence[str]) -> str:
    return f"there are: {', '.join(names)}"


def _refusal(
    options: RunOptions, needing: Sequence[str], asked: Sequence[str], found: Standing
) -> str:
    before = asked[: asked.index(needing[0])]
    first = replace(options.invocation(), plan="", steps_scale=1.0).line(["all"])
    ways = [f"validate it first: {first}"]
    ways += [f"stop before: --until {before[-1]}"] if before else []
    ways.append("or --without-go (the verdict will say so)")
    return (
        f"{needing[0]} starts only behind a GO of this configuration and machine in "
        f"{options.out}/: {found.why_not}; {'; '.join(ways)}"
    )
