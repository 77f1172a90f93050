"""The index of runs: `history.sqlite3` beside the run folders, made again from them at will.

run.json stays the only truth. The index holds one row per run and one per check or measurement;
a folder that is new, gone or changed since is noticed and read again.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from runbook.records import Measurement, RunRecord

FILE_NAME = "history.sqlite3"
_VERSION = 1
_WAIT_S = 10.0
_UNREADABLE = ("", "", "", None, 0, 0, 0)
_TABLES = """
CREATE TABLE runs (
    folder TEXT PRIMARY KEY, sha256 TEXT NOT NULL, problem TEXT NOT NULL, run_id TEXT NOT NULL,
    profile TEXT NOT NULL, verdict TEXT NOT NULL, started_at TEXT NOT NULL, finished_at TEXT,
    interrupted INTEGER NOT NULL, required INTEGER NOT NULL, passed INTEGER NOT NULL);
CREATE TABLE metrics (
    folder TEXT NOT NULL REFERENCES runs (folder) ON DELETE CASCADE, name TEXT NOT NULL,
    outcome TEXT NOT NULL, number REAL, text TEXT NOT NULL, unit TEXT NOT NULL, n INTEGER NOT NULL,
    stdev REAL, low REAL, high REAL, path TEXT NOT NULL, sha256 TEXT NOT NULL);
CREATE INDEX metrics_by_name ON metrics (name, folder);
"""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run in the list; `problem` says why its run.json could not be read, if it could not."""

    folder: str
    run_id: str
    profile: str
    verdict: str
    started_at: str
    finished_at: str | None
    interrupted: bool
    required: int
    passed: int
    problem: str


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """A check's or measurement's value in one run. `number` is None for texts."""

    run_id: str
    started_at: str
    profile: str
    verdict: str
    outcome: str
    number: float | None
    text: str
    unit: str
    n: int
    stdev: float | None
    low: float | None
    high: float | None
    path: str
    sha256: str


def sync(out_dir: Path) -> int:
    """Bring the index in line with the run folders; return how many were read again.

    A damaged index, or one of another version, is made anew. Raises sqlite3.Error or OSError if
    it cannot be written.
    """
    with _open(out_dir) as database:
        return _sync(database, out_dir)


def _sync(database: sqlite3.Connection, out_dir: Path) -> int:
    known = dict(database.execute("SELECT folder, sha256 FROM runs").fetchall())
    present = {
        path.parent.name: path
        for path in sorted(out_dir.glob("*/run.json"))
        if not path.parent.is_symlink()
    }
    for name in set(known) - set(present):
        database.execute("DELETE FROM runs WHERE folder = ?", (name,))
    changed = [
        path.parent
        for name, path in present.items()
        if known.get(name) != hashlib.sha256(path.read_bytes()).hexdigest()
    ]
    for folder in changed:
        _index(database, folder)
    return len(changed)


@contextmanager
def _open(out_dir: Path) -> Iterator[sqlite3.Connection]:
    """A transaction on the index; it is committed only if the block ends well."""
    path = out_dir / FILE_NAME
    _discard_if_unusable(path)
    with closing(sqlite3.connect(path, timeout=_WAIT_S)) as database, database:
        database.execute("PRAGMA foreign_keys = ON")
        # Taken at once, so that two programs cannot both create the tables.
        database.execute("BEGIN IMMEDIATE")
        if database.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            for statement in filter(str.strip, _TABLES.split(";")):
                database.execute(statement)
            database.execute(f"PRAGMA user_version = {_VERSION}")
        yield database


def _discard_if_unusable(path: Path) -> None:
    """Remove an index that is damaged or of another version: the run folders hold everything."""
    if not path.is_file():
        return
    try:
        with closing(sqlite3.connect(path, timeout=_WAIT_S)) as database:
            sound = database.execute("PRAGMA quick_check").fetchone()[0] == "ok"
            version = database.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        sound, version = False, 0
    if not sound or version not in (0, _VERSION):
        path.unlink()


def _index(database: sqlite3.Connection, folder: Path) -> None:
    from pydantic import ValidationError

    data = (folder / "run.json").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    database.execute("DELETE FROM runs WHERE folder = ?", (folder.name,))
    try:
        record = RunRecord.model_validate_json(data)
    except ValidationError as error:
        problem = f"run.json is no record of this version ({error.error_count()} problems)"
        _insert(database, "runs", (folder.name, digest, problem, folder.name, *_UNREADABLE))
        return
    outcomes = {check.id: check.outcome.value for check in record.checks()}
    passed = sum(outcomes.get(name) == "PASS" for name in set(record.required))
    facts = (record.run_id, record.profile, record.verdict.value, record.started_at)
    end = (record.finished_at, int(record.interrupted), len(set(record.required)), passed)
    _insert(database, "runs", (folder.name, digest, "", *facts, *end))
    for metric in _metrics(record):
        _insert(database, "metrics", (folder.name, *metric))


def _insert(database: sqlite3.Connection, table: str, row: tuple[object, ...]) -> None:
    marks = ", ".join("?" * len(row))
    database.execute(f"INSERT INTO {table} VALUES ({marks})", row)  # noqa: S608 - our own words


def _metrics(record: RunRecord) -> Iterator[tuple[object, ...]]:
    """Checks by their id; other measurements as `phase/name`."""
    for phase in record.phases:
        for check in phase.checks:
            if check.measurement is None:
                values: tuple[object, ...] = (None, check.reason, "", 0, None, None, None, "", "")
            else:
                values = _values(check.measurement)
            yield (check.id, check.outcome.value, *values)
        shown = {check.measurement for check in phase.checks if check.measurement}
        for one in phase.measurements:
            if one not in shown:
                yield (f"{phase.name}/{one.name}", "", *_values(one))


def _values(one: Measurement) -> tuple[object, ...]:
    number = float(one.value) if isinstance(one.value, int | float) else None
    low, high = one.interval or (None, None)
    return number, str(one.value), one.unit, one.n, one.stdev, low, high, one.path, one.sha256


def list_runs(out_dir: Path) -> list[RunRow]:
    """All runs, oldest first, after bringing the index up to date."""
    query = """SELECT folder, run_id, profile, verdict, started_at, finished_at, interrupted,
               required, passed, problem FROM runs ORDER BY started_at, folder"""
    rows = (dict(row) for row in _query(out_dir, query))
    return [RunRow(**(row | {"interrupted": bool(row["interrupted"])})) for row in rows]


def metric_names(out_dir: Path) -> list[str]:
    """Every name that `metric_rows` knows."""
    return [row["name"] for row in _query(out_dir, "SELECT DISTINCT name FROM metrics ORDER BY 1")]


def metric_rows(out_dir: Path, name: str) -> list[MetricRow]:
    """One metric through all runs, oldest first; a name that occurs twice in a run is two rows."""
    query = """SELECT run_id, started_at, profile, verdict, outcome, number, text, unit, n, stdev,
               low, high, path, metrics.sha256 FROM metrics JOIN runs USING (folder)
               WHERE name = ? ORDER BY started_at, folder, metrics.rowid"""
    return [MetricRow(**dict(row)) for row in _query(out_dir, query, name)]


def _query(out_dir: Path, query: str, *values: str) -> list[sqlite3.Row]:
    """The answer of the index after bringing it up to date."""
    with _open(out_dir) as database:
        _sync(database, out_dir)
        database.row_factory = sqlite3.Row
        return database.execute(query, values).fetchall()
