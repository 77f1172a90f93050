"""What a production launch stands on: a run that was GO for the same configuration and machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.contract import ENV_JSON, NSAError
from nsa.settings import Override, load_config
from runbook.config import Profile, Settings
from runbook.engine.accepted import check_whole, go_record, run_folders
from runbook.engine.identity import identity
from runbook.errors import RunbookError, UsageError
from runbook.launch.command import resolve_config
from runbook.records import LaunchEntry, RunRecord

# What a launch may do differently from the run behind it: how long, on which data, what it writes.
FREE_KEYS = frozenset(
    {
        *("data.dataset", "data.local_path", "data.text_field", "data.loader_timeout_s"),
        *("data.synthetic_on_fail", "train.steps", "train.out_dir", "train.log_every"),
        *("train.eval_every", "train.eval_batches", "train.save_every"),
    }
)
FREE_VARIABLES = frozenset({"NSA_TB_DISABLE", "NSA_DISABLE_CSV_LOGS", "NSA_DISABLE_AUX_STATS"})
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The accepted run: its id, what it said, and the variables that its phases chose.

    Without one `run_id` is empty, and `left_out` says why of each GO that was not taken.
    """

    run_id: str = ""
    said: str = ""
    chosen: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def why_not(self) -> str:
        """Why there is none, in words."""
        told = [f"{name}: {why}" for name, why in list(self.left_out.items())[:_NAMED]]
        return "; ".join(told) or "no run there was GO"


def find_standing(out: Path, profile: Profile, settings: Settings) -> Standing:
    """The newest run in `out` that was GO with this configuration, on this machine and code.

    Its files have to be those that it wrote. A run of a plan that itself needs a GO is none. Raises
    `UsageError` if the profile's config is wrong, `RunbookError` if there is none.
    """
    wanted = _config_of(profile, settings)
    left_out: dict[str, str] = {}
    if not out.is_dir():
        return Standing()
    for folder in run_folders(out, left_out):
        try:
            record = go_record(folder)
            if record is None or _launched(record):
                continue
            _check(folder, record, profile, settings, wanted)
        except (RunbookError, OSError) as error:
            left_out[folder.name] = str(error)
            continue
        chosen = {name: v for phase in record.phases for name, v in phase.choices.items() if v}
        return Standing(run_id=record.run_id, said=record.said, chosen=chosen)
    return Standing(left_out=left_out)


def _launched(record: RunRecord) -> bool:
    phases = record.profile_document.get("phases")
    found = phases.values() if isinstance(phases, Mapping) else ()
    return any(one.get("stage", {}).get("needs_go") for one in found if isinstance(one, Mapping))


def _check(
    folder: Path, record: RunRecord, profile: Profile, settings: Settings, wanted: Mapping[str, Any]
) -> None:
    """Raise `RunbookError` that says in what the run is another one."""
    now = identity()
    differ = [
        f"{name} {record.environment.get(name)} then, {value} now"
        for name, value in now.items()
        if record.environment.get(name) != value
    ]
    chosen = {name for phase in record.phases for name in phase.choices}
    theirs = {name: value for name, value in record.exports.items() if name not in chosen}
    mine = profile.variables | dict(settings.toggles)
    mine = {name: value for name, value in mine.items() if name not in chosen - {*settings.toggles}}
    differ += _differences(theirs, mine, without=FREE_VARIABLES)
    entries = [entry for phase in record.phases for entry in phase.launches]
    trained = [one for one in entries if one.launch.kind == "trainer" and one.result.ok]
    trained = [one for one in trained if one.launch.nproc == profile.ranks]
    if not trained:
        differ.append(f"no launch of it trained on {profile.ranks} rank(s)")
    configs = [_differences(_trained(folder, one), wanted, without=FREE_KEYS) for one in trained]
    differ += [] if [] in configs else configs[0] if configs else []
    if differ:
        raise RunbookError(", ".join(differ[:_NAMED]))
    check_whole(folder, record, trained)


def _differences(
    theirs: Mapping[str, Any], mine: Mapping[str, Any], *, without: frozenset[str]
) -> list[str]:
    return [
        f"{name} {theirs.get(name, 'unset')} then, {mine.get(name, 'unset')} now"
        for name in {**theirs, **mine}
        if name not in without and theirs.get(name) != mine.get(name)
    ]


def _config_of(profile: Profile, settings: Settings) -> dict[str, Any]:
    """The config that a launch of this profile trains, by dotted key."""
    changes = []
    for name, value in settings.config_overrides.items():
        section, _, key = name.partition(".")
        changes.append(Override(section=section, key=key, value=value, origin="--set"))
    try:
        loaded = load_config(resolve_config(profile.config), settings=changes)
    except NSAError as error:
        raise UsageError([f"{profile.config}: {text}" for text in error.problems]) from error
    return _flat(loaded.config.model_dump())


def _trained(folder: Path, entry: LaunchEntry) -> dict[str, Any]:
    """The config that a launch said that it trained."""
    path = folder / entry.launch.run_dir / ENV_JSON
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunbookError(f"{path.name} of {entry.launch.id} cannot be read: {error}") from error
    config = document.get("config") if isinstance(document, dict) else None
    return _flat(config) if isinstance(config, dict) else {}


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    sections = {name: one for name, one in config.items() if isinstance(one, Mapping)}
    return {f"{name}.{key}": value for name, one in sections.items() for key, value in one.items()}
