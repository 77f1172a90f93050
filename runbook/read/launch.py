"""A launch's run directory as evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa import contract
from runbook.read.documents import (
    CONSOLE_LOG,
    GPU_SAMPLES,
    GPU_SAMPLES_CSV,
    JUNIT_XML,
    file_sha256,
    read_console,
    read_json_object,
    read_junit,
)
from runbook.read.heartbeats import heartbeat_files, read_heartbeats
from runbook.read.rows import read_rows
from runbook.read.training import GATES, read_training_csv
from runbook.records import Launch, LaunchResult, LaunchStatus
from runbook.records.evidence import LaunchEvidence, RankLog

_DOCUMENTS = {
    "env": contract.ENV_JSON,
    "audit": contract.SDPA_AUDIT_JSON,
    "profile": contract.PROFILE_JSON,
}
_TABLES = (
    ("gates", contract.GATES_CSV, GATES),
    ("gpu_samples", GPU_SAMPLES_CSV, GPU_SAMPLES),
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
    _read_training(folder, run_root, problems, fields)
    _read_documents(folder, launch.run_dir, problems, fields)
    _read_tables(folder, launch.run_dir, problems, fields)
    ranks = _read_ranks(folder, run_root, result, problems)
    return LaunchEvidence(
        launch=launch,
        result=result,
        ranks=ranks,
        junit=read_junit(
            folder / JUNIT_XML, name=f"{launch.run_dir}/{JUNIT_XML}", problems=problems
        ),
        halted=(folder / contract.HALT_FILE).exists() or result.status is LaunchStatus.HALTED,
        problems=tuple(problems),
        **fields,
    )


def _read_training(
    folder: Path, run_root: Path, problems: list[str], fields: dict[str, Any]
) -> None:
    path = folder / contract.TRAINING_CSV
    if path.is_file():
        log = read_training_csv(path, relative_to=run_root)
        fields["training"] = log
        problems.extend(f"{log.path}: {problem}" for problem in log.problems)


def _read_documents(
    folder: Path, run_dir: str, problems: list[str], fields: dict[str, Any]
) -> None:
    for key, name in _DOCUMENTS.items():
        found: list[str] = []
        document, sha256 = read_json_object(folder / name, found)
        problems.extend(f"{run_dir}/{text}" for text in found)
        if sha256:
            fields[key] = document
            fields[f"{key}_path"] = f"{run_dir}/{name}"
            fields[f"{key}_sha256"] = sha256
    trace = folder / contract.TRACE_FILE
    if trace.is_file():
        fields["trace_path"] = f"{run_dir}/{contract.TRACE_FILE}"
        fields["trace_sha256"] = file_sha256(trace)
    console = folder / CONSOLE_LOG
    if console.is_file():
        fields["console_path"] = f"{run_dir}/{CONSOLE_LOG}"
        fields["console_lines"], fields["console_sha256"] = read_console(console)


def _read_tables(folder: Path, run_dir: str, problems: list[str], fields: dict[str, Any]) -> None:
    for key, name, spec in _TABLES:
        if (folder / name).is_file():
            rows = read_rows(folder / name, spec)
            problems.extend(f"{run_dir}/{name}: {problem}" for problem in rows.problems)
            fields[key] = rows.frame
            fields[f"{key}_path"], fields[f"{key}_sha256"] = f"{run_dir}/{name}", rows.sha256


def _read_ranks(
    folder: Path, run_root: Path, result: LaunchResult, problems: list[str]
) -> tuple[RankLog, ...]:
    logs = []
    for rank, path in heartbeat_files(folder).items():
        log = read_heartbeats(path, rank=rank, relative_to=run_root)
        problems.extend(f"{log.path}: {problem}" for problem in log.problems)
        if result.run_token and log.tokens - {result.run_token}:
            problems.append(f"{log.path}: heartbeats of another launch")
        logs.append(log)
    return tuple(logs)
