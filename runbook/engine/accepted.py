"""What earlier accepted runs measured in a phase, checked and kept beside its launches.

An accepted run was GO, did the same work on the same kind of machine, and its files are those of
its manifest, its record and its journal. Others that were GO are named with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa import contract
from runbook.engine.intact import journal_problems
from runbook.engine.journal import EVENTS_FILE
from runbook.engine.outputs import MANIFEST_FILE, RECORD_FILE, read_manifest, record_text
from runbook.errors import RunbookError
from runbook.files import write_atomic
from runbook.read import file_sha256, read_training_csv
from runbook.read.accepted import ACCEPTED_JSON, accepted_document
from runbook.read.alike import SAME, Facts, device_facts, env_facts, unlike
from runbook.read.documents import DEVICES_BEFORE_JSON, read_json_object
from runbook.read.shapes import DEVICES, ENV, Fields, shaped
from runbook.records import LaunchEntry, RunRecord, Verdict
from runbook.records.evidence import AcceptedRun
from runbook.stats.levels import LEVEL_WINDOW
from runbook.stats.throughput import StatisticsError, effective

_MOST_LOOKED_AT = 2000
_MOST_NAMED = 5


def keep_accepted(run_root: Path, phase: str, entries: Sequence[LaunchEntry]) -> None:
    """Write `accepted.json` of the phase: accepted runs beside this one, the last 30 at most.

    Nothing is written where no launch of the phase left an env.json, since nothing is known to be
    alike then. Raises `OSError` if the disk refuses.
    """
    mine = _phase_facts(run_root, entries)
    if mine is None:
        return
    runs: list[AcceptedRun] = []
    left_out: dict[str, str] = {}
    for folder, record in _go_runs(run_root, left_out):
        if len(runs) == LEVEL_WINDOW:
            break
        try:
            runs.append(_accepted(folder, record, phase, mine))
        except (RunbookError, OSError, StatisticsError) as error:
            left_out[record.run_id] = str(error)
    runs.reverse()
    left_out = dict(list(left_out.items())[:_MOST_NAMED])
    (run_root / phase).mkdir(mode=0o700, exist_ok=True)
    text = json.dumps(accepted_document(runs, left_out), indent=2, ensure_ascii=False)
    write_atomic(run_root / phase / ACCEPTED_JSON, f"{text}\n")


def _go_runs(run_root: Path, left_out: dict[str, str]) -> Iterator[tuple[Path, RunRecord]]:
    """Finished runs beside this one that were GO, newest first (an id begins with its time).

    One whose record cannot be read is put into `left_out`: it may have been GO.
    """
    older = (path for path in run_root.parent.iterdir() if path.name < run_root.name)
    folders = sorted(older, key=lambda path: path.name, reverse=True)
    for folder in folders[:_MOST_LOOKED_AT]:
        path = folder / RECORD_FILE
        if folder.is_symlink() or not path.is_file():
            continue
        try:
            document = json.loads(path.read_bytes())
            if isinstance(document, dict) and document.get("verdict") != Verdict.GO:
                continue
            record = RunRecord.model_validate(document)
        except (OSError, ValueError, RecursionError):
            left_out[folder.name] = f"its {RECORD_FILE} is no record of this version"
            continue
        yield folder, record
    if folders[_MOST_LOOKED_AT:]:
        left_out["older ones"] = f"only the newest {_MOST_LOOKED_AT} folders were looked at"


def _accepted(folder: Path, record: RunRecord, phase: str, mine: Facts) -> AcceptedRun:
    """The run's part in the phase. Raises `RunbookError` with the reason not to take it."""
    entries = next((one.launches for one in record.phases if one.name == phase), ())
    theirs = _phase_facts(folder, entries)
    if theirs is None:
        raise RunbookError(f"it has no env.json of {phase}")
    other = [one for one in unlike(theirs, mine, absent="absent") if one[0] in SAME]
    if other:
        raise RunbookError("; ".join(f"{what}: {a}, here {b}" for _, what, a, b in other[:3]))
    _check_files(folder, record, entries)
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


def _check_files(folder: Path, record: RunRecord, entries: Sequence[LaunchEntry]) -> None:
    """Raise `RunbookError` unless every file that is used is the one that the run wrote."""
    if folder.name != record.run_id:
        raise RunbookError(f"its folder is {folder.name}")
    names = [RECORD_FILE, EVENTS_FILE]
    for entry in entries:
        kept = (contract.TRAINING_CSV, contract.ENV_JSON, DEVICES_BEFORE_JSON)
        names += [f"{entry.launch.run_dir}/{name}" for name in kept]
    listed, root = read_manifest(folder / MANIFEST_FILE), folder.resolve()
    recorded = {artifact.path: artifact.sha256 for artifact in record.artifacts}
    for name in names:
        path = folder / name
        if not path.resolve().is_relative_to(root) or path.is_symlink():
            raise RunbookError(f"{name} is a link")
        if name not in listed and not path.exists():
            continue
        sha256 = file_sha256(path) if path.is_file() else ""
        if sha256 != listed.get(name):
            raise RunbookError(f"{name} is not the file of its {MANIFEST_FILE}")
        if name not in (RECORD_FILE, EVENTS_FILE) and sha256 != recorded.get(name):
            raise RunbookError(f"{name} is not the file of its {RECORD_FILE}")
    if (folder / RECORD_FILE).read_bytes().decode() != record_text(record):
        raise RunbookError(f"its {RECORD_FILE} is not as the runbook wrote it")
    if problems := journal_problems(folder, record):
        raise RunbookError(problems[0])


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
            found.append(env_facts(env) | device_facts(devices))
    other = [fact for one in found[1:] for fact in unlike(found[0], one, absent="absent")]
    return found[0] if found and not any(fact[0] in SAME for fact in other) else None


def _document(path: Path, shape: Fields) -> Mapping[str, Any] | None:
    document, _ = read_json_object(path, [])
    return None if document is None else shaped(document, shape, path.name)[0]
