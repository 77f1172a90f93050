"""What earlier runs are good for: a number to compare with, and the GO of a launch.

Is a run the validation of what is going to be launched? Here, in words, what differs. What earlier
accepted runs measured is checked and kept beside the launches of a phase: they were GO, did the
same work on the same kind of machine, and their files are those of manifest, record and journal.
Others that were GO are named with the reason; nobody knows what they were accepted with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.contract import ENV_JSON, TRAINING_CSV, NSAError
from nsa.contract.digests import sha256_of
from nsa.settings import load_config
from runbook.config import PhaseSettings, Profile
from runbook.config.plan import FREE_KEYS
from runbook.config.settings import Settings
from runbook.engine.derive import journal_problems
from runbook.engine.verify import of_the_machine
from runbook.errors import RunbookError, UsageError, listed
from runbook.files import write_atomic
from runbook.folder import ACCEPTED_JSON, DEVICES_BEFORE_JSON, EVENTS_FILE, RECORD_FILE
from runbook.folder.facts import Facts, differences, launch_facts, other_work, variable_facts
from runbook.folder.launch.documents import read_json_object
from runbook.folder.launch.evidence import read_training_csv
from runbook.folder.manifest import (
    DamagedRunError,
    check_digests,
    earlier_runs,
    go_record,
    record_bytes,
    record_text,
    renamed,
)
from runbook.launch.command import resolve_config
from runbook.machine.identity import CODE, code_digest, identity
from runbook.records import LaunchEntry, RunRecord
from runbook.records.evidence import AcceptedRun, AcceptedRuns
from runbook.stats.launches import LEVEL_WINDOW
from runbook.stats.throughput import StatisticsError, effective

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
    found = [f"it did not require {listed(missing, NAMED)}"] if missing else []
    if (scale := record.invocation.steps_scale) < steps_scale:
        found.append(f"--steps-scale {scale:g} then, {steps_scale:g} now")
    return found + other_profile(record, profile)


def other_devices(record: RunRecord, profile: Profile) -> str:
    """That the run was on other devices, whatever else differs with them; empty if it was not."""
    then = _devices(record.of_profile("hardware"))
    now = _devices(profile.hardware.model_dump())
    return f"it is of other devices: {then} then, {now} now" if then != now else ""


def _devices(hardware: Mapping[str, Any]) -> str:
    """`2 x A100`, or `CPUs`."""
    if hardware.get("device") != "cuda":
        return "CPUs"
    return f"{hardware.get('gpus')} x {hardware.get('gpu_name') or 'GPU'}"


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
    other = {
        name
        for name in record.of_profile("phases")
        if {*record.of_profile("phases", name, "config_overrides")} - FREE_KEYS
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


_MOST_NAMED = 5


def keep_accepted(
    run_root: Path, phase: str, entries: Sequence[LaunchEntry], *, profile: str
) -> None:
    """Write `accepted.json` of the phase: accepted runs beside this one, the last 30 at most.

    Nothing is written where no launch of the phase left an env.json, since nothing is known to be
    alike then. Raises `OSError` if the disk refuses.
    """
    mine = _phase_facts(run_root, entries)
    if mine is None:
        return
    runs: list[AcceptedRun] = []
    left_out: dict[str, str] = {}
    damaged: dict[str, str] = {}
    for folder in earlier_runs(run_root.parent, left_out, before=run_root.name):
        if len(runs) == LEVEL_WINDOW:
            break
        try:
            record = go_record(folder)
            if record is not None:
                runs.append(_accepted(folder, record, phase, mine, profile))
        except DamagedRunError as error:
            damaged[folder.name] = str(error)
        except OSError as error:
            damaged[folder.name] = f"{error.filename}: {error.strerror or error}"
        except (RunbookError, StatisticsError) as error:
            left_out[folder.name] = str(error)
    runs.reverse()
    few = [dict(list(names.items())[:_MOST_NAMED]) for names in (left_out, damaged)]
    kept = AcceptedRuns(runs=tuple(runs), left_out=few[0], damaged=few[1])
    (run_root / phase).mkdir(mode=0o700, exist_ok=True)
    write_atomic(run_root / phase / ACCEPTED_JSON, f"{kept.model_dump_json(indent=2)}\n")


def _accepted(
    folder: Path, record: RunRecord, phase: str, mine: Facts, profile: str
) -> AcceptedRun:
    """The run's part in the phase. Raises `RunbookError` with the reason not to take it."""
    _check_record(folder, record)
    entries = next((one.launches for one in record.phases if one.name == phase), ())
    files = (TRAINING_CSV, ENV_JSON, DEVICES_BEFORE_JSON)
    names = [f"{entry.launch.run_dir}/{name}" for entry in entries for name in files]
    try:
        check_digests(folder, record, names)
    except DamagedRunError as error:
        if record.profile == profile:
            raise
        # What it was accepted with is another kind of machine by its record, which is whole.
        raise RunbookError(f"profile {record.profile}, here {profile}; {error}") from error
    theirs = _phase_facts(folder, entries)
    if theirs is None:
        raise RunbookError(f"it has no env.json of {phase}")
    if other := other_work(theirs, mine):
        raise RunbookError("; ".join(f"{one.what}: {one.a}, here {one.b}" for one in other[:3]))
    rates = []
    for entry in entries:
        path = folder / entry.launch.run_dir / TRAINING_CSV
        log = read_training_csv(path, relative_to=folder)
        if log.damaged or not entry.result.ok:
            raise RunbookError(f"{log.path} is no evidence of a whole launch")
        rates.append(float(effective(log).value))
    return AcceptedRun(
        run_id=record.run_id,
        run_sha256=sha256_of(folder / RECORD_FILE),
        rates=tuple(rates),
        facts=tuple((*name, text) for name, text in sorted(theirs.items())),
    )


def _check_record(folder: Path, record: RunRecord) -> None:
    """Raise `DamagedRunError` unless record and journal are those that the run wrote.

    Other code may write the same record otherwise, and derive another one from the same journal:
    then it is only not taken (`RunbookError`).
    """
    if why := renamed(folder, record):
        raise DamagedRunError(why)
    check_digests(folder, record, (RECORD_FILE, EVENTS_FILE))
    if record_bytes(folder).decode() != record_text(record):
        problems = [f"its {RECORD_FILE} is not as the runbook writes it"]
    else:
        problems = journal_problems(folder, record)
    if problems and record.environment.get(CODE) == code_digest():
        raise DamagedRunError(problems[0])
    if problems:
        raise RunbookError(f"other code made it, and by this one {problems[0]}")


def _phase_facts(run_root: Path, entries: Sequence[LaunchEntry]) -> Facts | None:
    """What the phase's first launch ran on and with.

    None without an env.json, or where another launch did other work or was on another machine.
    """
    found: list[Facts] = []
    for launch in (entry.launch for entry in entries):
        if facts := launch_facts(run_root / launch.run_dir):
            found.append(facts | variable_facts(launch.env))
    other = any(other_work(found[0], one) for one in found[1:])
    return found[0] if found and not other else None
