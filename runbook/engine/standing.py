"""What a production launch stands on: a run that was GO for the same configuration and machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.contract import ENV_JSON, NSAError
from nsa.settings import Override, load_config
from runbook.config import Profile, Settings
from runbook.config.plan import FREE_KEYS
from runbook.config.profile import PhaseSettings
from runbook.engine.accepted import check_whole, go_record, run_folders
from runbook.engine.identity import identity
from runbook.errors import RunbookError, UsageError
from runbook.launch.command import resolve_config
from runbook.records import LaunchEntry, RunRecord

FREE_VARIABLES = frozenset({"NSA_TB_DISABLE", "NSA_DISABLE_CSV_LOGS", "NSA_DISABLE_AUX_STATS"})
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The accepted run: its id, what it said, and the variables that its phases chose.

    `parameters`: how many its model has. Without a run `run_id` is empty, and `left_out` says why
    of each GO that was not taken.
    """

    run_id: str = ""
    said: str = ""
    parameters: int = 0
    chosen: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def why_not(self) -> str:
        """Why there is none, in words."""
        told = [f"{name}: {why}" for name, why in list(self.left_out.items())[:_NAMED]]
        return "; ".join(told) or "no run there was GO"


def find_standing(
    out: Path, profile: Profile, settings: Settings, needing: Sequence[PhaseSettings] = ()
) -> Standing:
    """The newest run in `out` that was GO with this configuration, on this machine and code.

    `needing`: the phases of the plan that start only behind it, with what they change themselves.
    Its files have to be those that it wrote. A run of a plan that itself needs a GO is none. Raises
    `UsageError` if the profile's config is wrong, `RunbookError` if there is none.
    """
    wanted = [_launch_of(profile, settings, phase) for phase in needing or (None,)]
    left_out: dict[str, str] = {}
    if not out.is_dir():
        return Standing()
    for folder in run_folders(out, left_out):
        try:
            record = go_record(folder)
            if record is None or _launched(record):
                continue
            parameters = _check(folder, record, profile, settings, wanted)
        except (RunbookError, OSError) as error:
            left_out[folder.name] = str(error)
            continue
        chosen = {name: v for phase in record.phases for name, v in phase.choices.items() if v}
        return Standing(
            run_id=record.run_id, said=record.said, parameters=parameters, chosen=chosen
        )
    return Standing(left_out=left_out)


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What a launch is going to train: its config by dotted key, and its variables."""

    config: Mapping[str, Any]
    variables: Mapping[str, str]


def _launched(record: RunRecord) -> bool:
    phases = record.profile_document.get("phases")
    found = phases.values() if isinstance(phases, Mapping) else ()
    return any(one.get("stage", {}).get("needs_go") for one in found if isinstance(one, Mapping))


def _check(
    folder: Path,
    record: RunRecord,
    profile: Profile,
    settings: Settings,
    wanted: Sequence[_Wanted],
) -> int:
    """How many parameters it trained. Raise `RunbookError` that says in what it is another one."""
    now = identity()
    differ = [
        f"{name} {record.environment.get(name)} then, {value} now"
        for name, value in now.items()
        if record.environment.get(name) != value
    ]
    chosen = {name for phase in record.phases for name in phase.choices}
    theirs = {name: value for name, value in record.exports.items() if name not in chosen}
    ground = ground_of(record, profile.ranks)
    envs = [_env_of(folder, entry) for entry in ground]
    counts = set()
    for one in wanted:
        mine = {
            name: value
            for name, value in one.variables.items()
            if name not in chosen - {*settings.toggles}
        }
        differ += _differences(theirs, mine, without=FREE_VARIABLES)
        configs = [
            _differences(_flat(env.get("config")), one.config, without=FREE_KEYS) for env in envs
        ]
        differ += [] if [] in configs else configs[0] if configs else []
        counts |= {
            (env.get("effective") or {}).get("n_params")
            for env, found in zip(envs, configs, strict=True)
            if not found
        }
    if not ground:
        differ.append(f"no launch of it trained its own config on {profile.ranks} rank(s)")
    if len(counts) > 1:
        told = " and ".join(sorted(map(str, counts)))
        differ.append(f"its launches trained models of {told} parameters")
    if differ:
        raise RunbookError(", ".join(differ[:_NAMED]))
    check_whole(folder, record, ground)
    count = counts.pop()
    return count if isinstance(count, int) else 0


def ground_of(record: RunRecord, ranks: int) -> list[LaunchEntry]:
    """The launches that trained what the run measured: its own config, on all its ranks.

    A phase with settings of its own, such as another tokenizer, says nothing of the run's config.
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
        if entry.launch.kind == "trainer" and entry.result.ok and entry.launch.nproc == ranks
    ]


def _differences(
    theirs: Mapping[str, Any], mine: Mapping[str, Any], *, without: frozenset[str]
) -> list[str]:
    return [
        f"{name} {theirs.get(name, 'unset')} then, {mine.get(name, 'unset')} now"
        for name in {**theirs, **mine}
        if name not in without and theirs.get(name) != mine.get(name)
    ]


def _launch_of(profile: Profile, settings: Settings, phase: PhaseSettings | None) -> _Wanted:
    """What a phase of this profile trains; None for one that changes nothing."""
    own = phase.config_overrides if phase else {}
    changes = []
    for name, value in {**own, **settings.config_overrides}.items():
        section, _, key = name.partition(".")
        changes.append(Override(section=section, key=key, value=value, origin="--set"))
    try:
        loaded = load_config(resolve_config(profile.config), settings=changes)
    except NSAError as error:
        raise UsageError([f"{profile.config}: {text}" for text in error.problems]) from error
    variables = {name: one.value for name, one in phase.env.items()} if phase else {}
    return _Wanted(
        config=_flat(loaded.config.model_dump()),
        variables={**profile.variables, **variables, **settings.toggles},
    )


def _env_of(folder: Path, entry: LaunchEntry) -> Mapping[str, Any]:
    """What a launch said that it trained."""
    path = folder / entry.launch.run_dir / ENV_JSON
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunbookError(f"{path.name} of {entry.launch.id} cannot be read: {error}") from error
    return document if isinstance(document, dict) else {}


def _flat(config: object) -> dict[str, Any]:
    sections = config if isinstance(config, Mapping) else {}
    return {
        f"{name}.{key}": value
        for name, one in sections.items()
        if isinstance(one, Mapping)
        for key, value in one.items()
    }
