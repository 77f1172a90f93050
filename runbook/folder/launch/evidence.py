"""A launch's run directory as evidence; its training.csv also in the older headerless form."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from nsa import contract
from nsa.contract.digests import sha256_of
from nsa.strict_yaml import load_strict
from runbook.files import read_given
from runbook.folder import (
    CHECKOUT_JSON,
    CONSOLE_LOG,
    DEVICES_AFTER_JSON,
    DEVICES_BEFORE_JSON,
    GPU_SAMPLES_CSV,
    JUNIT_XML,
    KERNEL_LOG_JSON,
    LAUNCH_JSON,
    LOAD_JSON,
    PROCESSES_CSV,
    RESOURCES_CSV,
    kept_config,
)
from runbook.folder.launch import heartbeat_files
from runbook.folder.launch.documents import (
    GPU_SAMPLES,
    RESOURCES,
    name_below,
    read_console,
    read_json_object,
    read_junit,
)
from runbook.folder.launch.own_log import PROCESSES, last_steps, read_own_log
from runbook.folder.launch.rows import RowSpec, read_rows
from runbook.records import Launch, LaunchResult, LaunchStatus
from runbook.records.evidence import LaunchEvidence, RankLog, SetAside, TrainingLog

TRAINING_COLUMNS = contract.names(contract.TRAINING_COLUMNS)
LEGACY_COLUMNS = TRAINING_COLUMNS[:4]


def _spec(columns: tuple[contract.Column, ...], *, headerless: tuple[str, ...] = ()) -> RowSpec:
    return RowSpec(
        columns=contract.names(columns),
        text=frozenset(column.name for column in columns if column.kind is str),
        filled=frozenset(column.name for column in columns if column.filled),
        whole=frozenset(column.name for column in columns if column.kind is int),
        headerless=headerless,
    )


TRAINING = _spec(contract.TRAINING_COLUMNS, headerless=LEGACY_COLUMNS)
GATES = _spec(contract.GATES_COLUMNS)
VAL = _spec(contract.VAL_COLUMNS)
_DOCUMENTS = {
    "env": contract.ENV_JSON,
    "audit": contract.SDPA_AUDIT_JSON,
    "profile": contract.PROFILE_JSON,
    "ceilings": contract.CEILINGS_JSON,
    "devices_before": DEVICES_BEFORE_JSON,
    "devices_after": DEVICES_AFTER_JSON,
    "kernel_log": KERNEL_LOG_JSON,
    "checkout": CHECKOUT_JSON,
    "load": LOAD_JSON,
}
_TABLES = (
    ("gates", contract.GATES_CSV, GATES),
    ("val", contract.VAL_CSV, VAL),
    ("gpu_samples", GPU_SAMPLES_CSV, GPU_SAMPLES),
    ("processes", PROCESSES_CSV, PROCESSES),
    ("resources", RESOURCES_CSV, RESOURCES),
)


def read_launch(run_root: Path, launch: Launch, result: LaunchResult) -> LaunchEvidence:
    """Read everything that a launch left in `run_root / launch.run_dir`.

    What is absent is None; what is damaged is read as far as it is whole and named in `problems`,
    each with its file. Paths in the result are relative to `run_root`. Only an unreadable disk
    raises (`OSError`).
    """
    folder = run_root / launch.run_dir
    if not folder.is_dir():
        return LaunchEvidence(launch=launch, result=result)
    problems: list[str] = []
    fields: dict[str, Any] = {}

    files: dict[str, tuple[str, str]] = {}

    def keep(key: str, name: str, sha256: str) -> None:
        files[key] = f"{launch.run_dir}/{name}", sha256

    log, clock = _read_log(folder, run_root, launch)
    if log is not None:
        fields["training"] = log
        problems.extend(f"{log.path}: {problem}" for problem in log.problems)
    if launch.own is not None:
        fields["last_steps"] = last_steps(folder, launch.own, launch.nproc)
    for key, name in _DOCUMENTS.items():
        found: list[str] = []
        document, sha256 = read_json_object(folder / name, found, shape=key)
        problems.extend(f"{launch.run_dir}/{text}" for text in found)
        if sha256:
            fields[key] = document
            keep(key, name, sha256)
    if (folder / contract.TRACE_FILE).is_file():
        keep("trace", contract.TRACE_FILE, sha256_of(folder / contract.TRACE_FILE))
    if (folder / CONSOLE_LOG).is_file():
        fields["console_lines"], sha256 = read_console(folder / CONSOLE_LOG)
        keep("console", CONSOLE_LOG, sha256)
    for key, name, spec in _TABLES:
        if (folder / name).is_file():
            rows = read_rows(folder / name, spec)
            problems.extend(f"{launch.run_dir}/{name}: {problem}" for problem in rows.problems)
            fields[key] = rows.frame
            keep(key, name, rows.sha256)
    ranks = clock if launch.own else _read_ranks(folder, run_root, result, problems)
    junit = f"{launch.run_dir}/{JUNIT_XML}"
    return LaunchEvidence(
        launch=launch,
        result=result,
        files=files,
        ranks=ranks,
        junit=read_junit(folder / JUNIT_XML, name=junit, problems=problems),
        config=_read_config(run_root, launch),
        aside=_read_aside(run_root, launch, problems),
        halted=(folder / contract.HALT_FILE).exists() or result.status is LaunchStatus.HALTED,
        problems=tuple(problems),
        **fields,
    )


def _read_log(
    folder: Path, run_root: Path, launch: Launch
) -> tuple[TrainingLog | None, tuple[RankLog, ...]]:
    if launch.own is not None:
        return read_own_log(folder, launch.own, ranks=launch.nproc, relative_to=run_root)
    path = folder / contract.TRAINING_CSV
    return (read_training_csv(path, relative_to=run_root) if path.is_file() else None), ()


def _read_config(run_root: Path, launch: Launch) -> dict[str, Any] | None:
    """None where the run has no copy that says something: the trainer was refused by it, too."""
    path = kept_config(run_root, launch.named_config)
    if path is None:
        return None
    try:
        document, _ = load_strict(read_given(path).decode("utf-8", "replace"))
    except OSError:
        return None
    return document if isinstance(document, dict) else None


def _read_ranks(
    folder: Path, run_root: Path, result: LaunchResult, problems: list[str]
) -> tuple[RankLog, ...]:
    from runbook.folder.launch.rank_log import read_heartbeats

    logs = []
    for rank, path in heartbeat_files(folder).items():
        log = read_heartbeats(path, rank=rank, relative_to=run_root)
        problems.extend(f"{log.path}: {problem}" for problem in log.problems)
        if result.run_token and log.tokens - {result.run_token}:
            problems.append(f"{log.path}: heartbeats of another launch")
        logs.append(log)
    return tuple(logs)


def _read_aside(run_root: Path, launch: Launch, problems: list[str]) -> tuple[SetAside, ...]:
    """The earlier starts of a launch, whose folders lie beside its own or beside its phase's."""
    own = PurePosixPath(launch.run_dir)
    found = [*run_root.glob(f"{own}.*[0-9]"), *run_root.glob(f"{own.parent}.*[0-9]/{own.name}*")]
    starts = (_start(folder, run_root, problems) for folder in found)
    return tuple(sorted((one for one in starts if one), key=lambda one: one.began))


def _start(folder: Path, run_root: Path, problems: list[str]) -> SetAside | None:
    name = folder.relative_to(run_root).as_posix()
    document, _ = read_json_object(folder / LAUNCH_JSON, problems)
    try:
        began = datetime.fromisoformat(str((document or {}).get("started_at"))).timestamp()
    except ValueError:
        problems.append(f"{name}/{LAUNCH_JSON}: when it was started cannot be read")
        return None
    from runbook.folder.launch.rank_log import read_heartbeats

    first, ended = None, began
    for rank, path in list(heartbeat_files(folder).items())[:1]:
        log = read_heartbeats(path, rank=rank, relative_to=run_root)
        first = None if log.steps is None or log.steps.empty else float(log.steps["ts"].iloc[0])
        ended = log.last_ts or began
    return SetAside(folder=name, began=began, first_step=first, ended=max(began, ended))


def read_training_csv(path: Path, *, relative_to: Path) -> TrainingLog:
    """Read a training.csv; `path` in the result is relative to `relative_to` where it lies below.

    Only complete rows are in the frame. A torn last line is dropped and counted, and is no
    damage; anything wrong before it is (`damaged`): unreadable rows, a second header, steps that
    go back or repeat (several runs, two writers, or rows written twice). Raises `OSError` if the
    file cannot be read at all.
    """
    rows = read_rows(path, TRAINING)
    frame, problems, damaged = rows.frame, list(rows.problems), rows.damaged
    if "warmup" in frame:
        frame["warmup"] = frame["warmup"] != 0
    back = int((frame["step"].diff() <= 0).sum()) if "step" in frame else 0
    if back:
        damaged = True
        problems.append(
            f"steps do not increase at {back} places: several runs, two writers, or rows written "
            "twice in one file"
        )
    if rows.legacy:
        problems.append("the file has no header; read as step,loss,lr,toks_per_s")
    missing = [name for name in TRAINING_COLUMNS if name not in frame] if not rows.legacy else []
    if missing:
        problems.append(f"the header lacks: {', '.join(missing)}")
    told = {"problems": tuple(problems), "damaged": damaged}
    return TrainingLog(path=name_below(path, relative_to), **{**vars(rows), **told})
