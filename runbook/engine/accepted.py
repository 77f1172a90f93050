"""What earlier accepted runs measured in a phase, checked and kept beside its launches.

An accepted run was GO, did the same work on the same kind of machine, and its files are those of
its manifest, its record and its journal. Others that were GO are named with the reason, and those
whose files cannot be trusted apart from the rest: nobody knows what they were accepted with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa import contract
from runbook.engine.identity import CODE, code_digest
from runbook.engine.intact import journal_problems
from runbook.engine.ongoing import EVENTS_FILE, is_going_on
from runbook.engine.outputs import (
    MANIFEST_FILE,
    RECORD_FILE,
    RUN_ID,
    read_manifest,
    record_text,
)
from runbook.errors import RunbookError
from runbook.files import read_bytes, write_atomic
from runbook.read import file_sha256, read_training_csv
from runbook.read.accepted import ACCEPTED_JSON, accepted_document
from runbook.read.alike import SAME, Facts, device_facts, env_facts, unlike, variable_facts
from runbook.read.documents import DEVICES_BEFORE_JSON, read_json_object
from runbook.read.shapes import DEVICES, ENV, Fields, shaped
from runbook.records import LaunchEntry, RunRecord, Verdict
from runbook.records.evidence import AcceptedRun
from runbook.stats.levels import LEVEL_WINDOW
from runbook.stats.throughput import StatisticsError, effective

_MOST_LOOKED_AT = 2000
_MOST_NAMED = 5


class DamagedRunError(RunbookError):
    """A run that was accepted, or may have been, and whose files are not those that it wrote."""


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
    for folder in run_folders(run_root.parent, left_out, before=run_root.name):
        if len(runs) == LEVEL_WINDOW:
            break
        try:
            record = go_record(folder)
            if record is not None:
                runs.append(_accepted(folder, record, phase, mine, profile))
        except (DamagedRunError, OSError) as error:
            damaged[folder.name] = str(error)
        except (RunbookError, StatisticsError) as error:
            left_out[folder.name] = str(error)
    runs.reverse()
    few = (dict(list(names.items())[:_MOST_NAMED]) for names in (left_out, damaged))
    (run_root / phase).mkdir(mode=0o700, exist_ok=True)
    text = json.dumps(accepted_document(runs, *few), indent=2, ensure_ascii=False)
    write_atomic(run_root / phase / ACCEPTED_JSON, f"{text}\n")


def run_folders(out: Path, left_out: dict[str, str], *, before: str = "") -> Iterator[Path]:
    """Run folders, newest first (an id begins with its time); `before`: those older than a run."""
    folders = sorted(
        (path for path in out.iterdir() if _is_older(path, before)),
        key=lambda path: path.name,
        reverse=True,
    )
    yield from folders[:_MOST_LOOKED_AT]
    if folders[_MOST_LOOKED_AT:]:
        left_out["older ones"] = f"only the newest {_MOST_LOOKED_AT} folders were looked at"


def _is_older(path: Path, name: str) -> bool:
    run = RUN_ID.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    return bool(run) and (not name or path.name < name)


def go_record(folder: Path) -> RunRecord | None:
    """The record of a finished run that was GO; None if it was not, or has not finished.

    Raises what `run_document` does, and `RunbookError` if this version cannot read a GO's record.
    """
    document = run_document(folder)
    return valid_record(document) if is_go(document) else None


def is_go(document: object) -> bool:
    """Is this the document of a run.json that says GO?"""
    return isinstance(document, dict) and document.get("verdict") == Verdict.GO


def valid_record(document: object) -> RunRecord:
    """The record in a run.json. Raises `RunbookError` if this version cannot read it."""
    try:
        return RunRecord.model_validate(document)
    except ValueError as error:
        raise RunbookError(f"its {RECORD_FILE} is no record of this version") from error


def run_document(folder: Path) -> object:
    """What the run.json of a folder holds; None if there is none, or no JSON.

    Where it says GO the run has finished, and it is the file that the run wrote. Raises
    `DamagedRunError` if it cannot be told whether it was GO, `RunbookError` if that one goes on.
    """
    path, finished = folder / RECORD_FILE, (folder / MANIFEST_FILE).is_file()
    if not path.is_file():
        if finished:
            raise DamagedRunError(f"its {RECORD_FILE} is gone")
        return None
    document = _json(read_bytes(path))
    was_go = is_go(document)
    if finished:
        if file_sha256(path) != _listed(folder).get(RECORD_FILE):
            raise DamagedRunError(f"{RECORD_FILE} is not the file of its {MANIFEST_FILE}")
    elif (was_go or document is None) and is_going_on(folder):
        raise RunbookError("still going on")
    elif was_go or document is None:
        raise DamagedRunError(f"it has no {MANIFEST_FILE}: removed, or cut off (--resume)")
    return document


def _json(text: bytes) -> object:
    """What the text holds; None if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _listed(folder: Path) -> dict[str, str]:
    try:
        return read_manifest(folder / MANIFEST_FILE)
    except RunbookError as error:
        raise DamagedRunError(str(error)) from error


def _accepted(
    folder: Path, record: RunRecord, phase: str, mine: Facts, profile: str
) -> AcceptedRun:
    """The run's part in the phase. Raises `RunbookError` with the reason not to take it."""
    _check_record(folder, record)
    entries = next((one.launches for one in record.phases if one.name == phase), ())
    try:
        _check_files(folder, record, entries)
    except DamagedRunError as error:
        if record.profile == profile:
            raise
        # What it was accepted with is another kind of machine by its record, which is whole.
        raise RunbookError(f"profile {record.profile}, here {profile}; {error}") from error
    theirs = _phase_facts(folder, entries)
    if theirs is None:
        raise RunbookError(f"it has no env.json of {phase}")
    other = [one for one in unlike(theirs, mine, absent="absent") if one[0] in SAME]
    if other:
        raise RunbookError("; ".join(f"{what}: {a}, here {b}" for _, what, a, b in other[:3]))
    rates = []
    for entry in entries:
        path = folder / entry.launch.run_dir / contract.TRAINING_CSV
        log = read_training_csv(path, relative_to=folder)
        if log.damaged or not entry.result.ok:
            raise RunbookError(f"{log.path} is no evidence of a whole launch")
        rates.append(float(effective(log).value))
    return AcceptedRun(
        run_id=record.run_id,
        run_sha256=file_sha256(folder / RECORD_FILE),
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
    _check_digests(folder, record, (RECORD_FILE, EVENTS_FILE))
    if read_bytes(folder / RECORD_FILE).decode() != record_text(record):
        problems = [f"its {RECORD_FILE} is not as the runbook writes it"]
    else:
        problems = journal_problems(folder, record)
    if problems and record.environment.get(CODE) == code_digest():
        raise DamagedRunError(problems[0])
    if problems:
        raise RunbookError(f"other code made it, and by this one {problems[0]}")


def _check_files(folder: Path, record: RunRecord, entries: Sequence[LaunchEntry]) -> None:
    """Raise `DamagedRunError` unless the files of the launches are those that the run wrote."""
    kept = (contract.TRAINING_CSV, contract.ENV_JSON, DEVICES_BEFORE_JSON)
    names = [f"{entry.launch.run_dir}/{name}" for entry in entries for name in kept]
    _check_digests(folder, record, names)


def _check_digests(folder: Path, record: RunRecord, names: Iterable[str]) -> None:
    listed, root = _listed(folder), folder.resolve()
    recorded = {artifact.path: artifact.sha256 for artifact in record.artifacts}
    for name in names:
        path = folder / name
        if not path.resolve().is_relative_to(root) or path.is_symlink():
            raise DamagedRunError(f"{name} is a link")
        if name not in listed and name not in recorded and not path.exists():
            continue
        sha256 = file_sha256(path) if path.is_file() else ""
        if sha256 != listed.get(name):
            raise DamagedRunError(f"{name} is not the file of its {MANIFEST_FILE}")
        if name not in (RECORD_FILE, EVENTS_FILE) and sha256 != recorded.get(name):
            raise DamagedRunError(f"{name} is not the file of its {RECORD_FILE}")


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
    other = [fact for one in found[1:] for fact in unlike(found[0], one, absent="absent")]
    return found[0] if found and not any(fact[0] in SAME for fact in other) else None


def _document(path: Path, shape: Fields) -> Mapping[str, Any] | None:
    document, _ = read_json_object(path, [])
    return None if document is None else shaped(document, shape, path.name)[0]
