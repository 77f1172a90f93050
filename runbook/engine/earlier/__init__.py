"""What earlier runs are good for: a number to compare with, and the GO of a launch.

Is a run the validation of what is going to be launched? Here, in words, what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.contract import ENV_JSON, NSAError
from nsa.settings import load_config
from runbook.config.plan import FREE_KEYS
from runbook.config.profile import PhaseSettings, Profile
from runbook.config.settings import Settings
from runbook.engine.intact import of_the_machine
from runbook.errors import RunbookError, UsageError
from runbook.folder.facts import differences
from runbook.folder.launch.documents import read_json_object
from runbook.launch.command import resolve_config
from runbook.machine.identity import identity
from runbook.records import LaunchEntry, RunRecord

FREE_VARIABLES = frozenset({"NSA_TB_DISABLE", "NSA_DISABLE_CSV_LOGS", "NSA_DISABLE_AUX_STATS"})
NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a launch is going to train: its config and its variables.

    `given` names the variables that a person gave, which nothing that a run chose goes over.
    """

    config: Mapping[str, Any]
    variables: Mapping[str, str]
    given: frozenset[str]


def less_than_asked(record: RunRecord, profile: Profile, steps_scale: float) -> list[str]:
    """In what the run validated less than the profile here asks for, or by other limits."""
    missing = [check for check in profile.required if check not in record.required]
    named = ", ".join(missing[:NAMED])
    more = f" and {len(missing) - NAMED} more" if missing[NAMED:] else ""
    found = [f"it did not require {named}{more}"] if missing else []
    scale = float(str(record.options.get("steps_scale") or 1.0))
    if scale < steps_scale:
        found.append(f"--steps-scale {scale:g} then, {steps_scale:g} now")
    return found + other_profile(record, profile)


def other_devices(record: RunRecord, profile: Profile) -> str:
    """That the run was on other devices, whatever else differs with them; empty if it was not."""
    then = _devices(record.profile_document.get("hardware"))
    now = _devices(profile.hardware.model_dump())
    return f"it is of other devices: {then} then, {now} now" if then != now else ""


def _devices(hardware: object) -> str:
    """`2 x A100`, or `CPUs`."""
    known = hardware if isinstance(hardware, Mapping) else {}
    if known.get("device") != "cuda":
        return "CPUs"
    return f"{known.get('gpus')} x {known.get('gpu_name') or 'GPU'}"


def other_profile(record: RunRecord, profile: Profile) -> list[str]:
    """In what the run was held against another profile of a machine than this one."""
    mine = profile.model_dump(mode="json")
    theirs, here = (of_the_machine(one, mine) for one in (record.profile_document, mine))
    return _then_and_now(theirs, here)


def compared(
    folder: Path,
    record: RunRecord,
    wanted: Sequence[Wanted],
    ground: Sequence[LaunchEntry],
) -> tuple[list[str], set[Any]]:
    """In what the run was another configuration, machine or code; and its numbers of parameters."""
    differ = [
        f"{name} {record.environment.get(name)} then, {value} now"
        for name, value in identity().items()
        if record.environment.get(name) != value
    ]
    chosen = {name for phase in record.phases for name in phase.choices}
    envs = [_env_of(folder, entry) for entry in ground]
    counts = set()
    for one in wanted:
        # What is given now may be what the run chose and printed: lines to export before a launch.
        free = FREE_VARIABLES | (chosen - one.given)
        differ += _then_and_now(record.exports, one.variables, without=free)
        configs = [
            _then_and_now(env.get("config") or {}, one.config, without=FREE_KEYS) for env in envs
        ]
        differ += [] if [] in configs else configs[0] if configs else []
        counts |= {
            (env.get("effective") or {}).get("n_params")
            for env, found in zip(envs, configs, strict=True)
            if not found
        }
    return differ, counts


def ground_of(record: RunRecord, ranks: int, *, finished: bool = True) -> list[LaunchEntry]:
    """The launches that trained what the run measured: its own config, on all its ranks.

    A phase with settings of its own, such as another tokenizer, says nothing of the run's config.
    `finished`: only those that ended well.
    """
    phases = record.profile_document.get("phases")
    settings = phases if isinstance(phases, Mapping) else {}
    other = {
        name
        for name, one in settings.items()
        if isinstance(one, Mapping) and {*one.get("config_overrides", {})} - FREE_KEYS
    }
    entries = [
        entry for phase in record.phases if phase.name not in other for entry in phase.launches
    ]
    return [
        entry
        for entry in entries
        if entry.launch.kind == "trainer"
        and entry.launch.nproc == ranks
        and (entry.result.ok if finished else entry.result.attempts)
    ]


def _then_and_now(
    theirs: Mapping[str, Any], mine: Mapping[str, Any], *, without: frozenset[str] = frozenset()
) -> list[str]:
    return [
        f"{key} {_said(then)} then, {_said(now)} now"
        for key, then, now in differences(theirs, mine)
        if key not in without
    ]


def _said(value: object) -> object:
    return "unset" if value is None else value


def launch_of(profile: Profile, settings: Settings, phase: PhaseSettings | None) -> Wanted:
    """What a phase of this profile trains; None for one that changes nothing."""
    own = phase.config_overrides if phase else {}
    changes = {**own, **settings.config_overrides}
    try:
        loaded = load_config(resolve_config(profile.config), settings=changes)
    except NSAError as error:
        raise UsageError([f"{profile.config}: {text}" for text in error.problems]) from error
    return Wanted(
        config=loaded.config.model_dump(),
        variables={**profile.variables, **(phase.variables if phase else {}), **settings.toggles},
        given=frozenset(settings.toggles),
    )


def _env_of(folder: Path, entry: LaunchEntry) -> Mapping[str, Any]:
    """What a launch said that it trained."""
    problems: list[str] = []
    document, _ = read_json_object(folder / entry.launch.run_dir / ENV_JSON, problems)
    if document is None:
        why = "; ".join(problems) or "it is gone"
        raise RunbookError(f"{ENV_JSON} of {entry.launch.id} cannot be read: {why}")
    return document
