"""What earlier accepted runs measured in a phase, checked and kept beside its launches.

An accepted run was GO, did the same work on the same kind of machine, and its files are those of
its manifest, its record and its journal. Others that were GO are named with the reason, and those
whose files cannot be trusted apart from the rest: nobody knows what they were accepted with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa import contract
from nsa.contract import sha256_of
from runbook.engine.intact import journal_problems
from runbook.errors import RunbookError
from runbook.files import write_atomic
from runbook.folder import (
    ACCEPTED_JSON,
    DEVICES_BEFORE_JSON,
    EVENTS_FILE,
    RECORD_FILE,
)
from runbook.folder.facts import (
    Facts,
    device_facts,
    env_facts,
    other_work,
    variable_facts,
)
from runbook.folder.integrity import DamagedRunError, check_digests, earlier_runs, go_record
from runbook.folder.launch.documents import read_json_object
from runbook.folder.launch.evidence import read_training_csv
from runbook.folder.launch.shapes import DEVICES, ENV, Fields, shaped
from runbook.folder.manifest import record_bytes, record_text
from runbook.machine.identity import CODE, code_digest
from runbook.records import LaunchEntry, RunRecord
from runbook.records.evidence import AcceptedRun, AcceptedRuns
from runbook.stats.levels import LEVEL_WINDOW
from runbook.stats.throughput import StatisticsError, effective

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
    files = (contract.TRAINING_CSV, contract.ENV_JSON, DEVICES_BEFORE_JSON)
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
        path = folder / entry.launch.run_dir / contract.TRAINING_CSV
        log = read_training_csv(path, relative_to=folder)
        if log.damaged or not entry.result.ok:
            raise RunbookError(f"{log.path} is no evidence of a whole launch")
        rates.append(float(effective(log).value))
    return AcceptedRun(
        run_id=record.run_id,
        run_sha256=sha256_of(folder / RECORD_FILE),
        rates=tuple(rates),
        facts=theirs,
    )


def _check_record(folder: Path, record: RunRecord) -> None:
    """Raise `DamagedRunError` unless record and journal are those that the run wrote.

    Other code may write the same record otherwise, and derive another one from the same journal:
    then it is only not taken (`RunbookError`).
    """
    if folder.name != record.run_id:
        raise DamagedRunError(f"its folder is {folder.name}, its run {record.run_id}")
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
    for entry in entries:
        folder = run_root / entry.launch.run_dir
        env = _document(folder / contract.ENV_JSON, ENV)
        if env is not None:
            devices = _document(folder / DEVICES_BEFORE_JSON, DEVICES)
            found.append(env_facts(env) | device_facts(devices) | variable_facts(entry.launch.env))
    other = any(other_work(found[0], one) for one in found[1:])
    return found[0] if found and not other else None


def _document(path: Path, shape: Fields) -> Mapping[str, Any] | None:
    document, _ = read_json_object(path, [])
    return None if document is None else shaped(document, shape, path.name)[0]
