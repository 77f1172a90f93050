"""The index of runs: `history.sqlite3` beside the run folders, made again from them at will.

run.json stays the only truth. The index holds one row per run and one per check or measurement;
a folder that is new, gone or changed since is noticed and read again. Only its owner may read it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from runbook.errors import RunbookError
from runbook.files import read_bytes
from runbook.folder.journal import RUNNING, running_text
from runbook.folder.manifest import record_bytes, record_is_changed
from runbook.folder.names import RECORD_FILE, run_folders
from runbook.records import Measurement, PhaseRecord, RunRecord, satisfies
from runbook.records.measurement import TOKENS_PER_SECOND

FILE_NAME = "history.sqlite3"
_VERSION = 3
_WAIT_S = 10.0
_POLL_S = 0.02
# Half of the processors busy with something else, as preflight's row of host settings has it.
BUSY_LOAD = 0.5
_TABLES = """
CREATE TABLE runs (
    folder TEXT PRIMARY KEY, sha256 TEXT NOT NULL, problem TEXT NOT NULL, run_id TEXT NOT NULL,
    profile TEXT NOT NULL, verdict TEXT NOT NULL, said TEXT NOT NULL, scope TEXT NOT NULL,
    commit_sha TEXT NOT NULL, started_at TEXT NOT NULL, finished_at TEXT, duration_s REAL,
    throughput REAL, load REAL, flaky INTEGER NOT NULL, interrupted INTEGER NOT NULL,
    required INTEGER NOT NULL, passed INTEGER NOT NULL);
CREATE TABLE metrics (
    folder TEXT NOT NULL REFERENCES runs (folder) ON DELETE CASCADE, name TEXT NOT NULL,
    line TEXT NOT NULL, on_what TEXT NOT NULL, outcome TEXT NOT NULL, number REAL,
    text TEXT NOT NULL, unit TEXT NOT NULL, n INTEGER NOT NULL, stdev REAL, low REAL, high REAL,
    path TEXT NOT NULL, sha256 TEXT NOT NULL, comparator TEXT NOT NULL, bound REAL);
CREATE INDEX metrics_by_name ON metrics (name, folder);
"""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run in the list; `problem` says what is wrong with its run.json, if anything is.

    `throughput` is the first row `PHASE.throughput` in tok/s, `load` the load per CPU when
    the run began, `flaky` how many launches needed a second attempt; None where nothing says.
    """

    folder: str
    problem: str = ""
    run_id: str
    profile: str = ""
    verdict: str = ""
    said: str = ""
    scope: str = ""
    commit_sha: str = ""
    started_at: str = ""
    finished_at: str | None = None
    duration_s: float | None = None
    throughput: float | None = None
    load: float | None = None
    flaky: int = 0
    interrupted: bool = False
    required: int = 0
    passed: int = 0

    @property
    def marks(self) -> tuple[str, ...]:
        """What a reader of the list should know besides the verdict."""
        load = "" if self.load is None else f"load {self.load:.2g} per CPU"
        busy = self.load is not None and self.load >= BUSY_LOAD
        flaky = f"FLAKY ({self.flaky})" if self.flaky else ""
        cut = "interrupted" if self.interrupted else ""
        return tuple(text for text in (self.problem, cut, flaky, load if busy else "") if text)


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """A check's or measurement's value in one run. `number` is None for texts.

    Rows of one `line` are comparable: the same profile, settings, options, workload and devices;
    `on_what` says on which. `bound` is the limit that it was held against, by `comparator`.
    """

    name: str
    run_id: str
    started_at: str
    profile: str
    verdict: str
    line: str
    on_what: str
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
    comparator: str
    bound: float | None


def sync(out_dir: Path) -> int:
    """Bring the index in line with the run folders; return how many were read again.

    A damaged index, or one of another version, is made anew. Raises sqlite3.Error or OSError if
    it cannot be written, RunbookError if it is a link or another program keeps it for too long.
    """
    with _open(out_dir) as database:
        return _sync(database, out_dir)


def _sync(database: sqlite3.Connection, out_dir: Path) -> int:
    known = dict(database.execute("SELECT folder, sha256 FROM runs").fetchall())
    present = {
        folder.name: folder / RECORD_FILE
        for folder in run_folders(out_dir)
        if (folder / RECORD_FILE).is_file() and not folder.is_symlink()
    }
    for name in set(known) - set(present):
        database.execute("DELETE FROM runs WHERE folder = ?", (name,))
    changed = [
        path.parent
        for name, path in present.items()
        if known.get(name) != hashlib.sha256(read_bytes(path)).hexdigest()
    ]
    for folder in changed:
        _index(database, folder)
    return len(changed)


@contextmanager
def _open(out_dir: Path) -> Iterator[sqlite3.Connection]:
    """A transaction on the index; it is committed only if the block ends well."""
    path = out_dir / FILE_NAME
    with _alone(out_dir):
        _make_private(path)
        _discard_if_unusable(path)
        _make_private(path)
        with closing(sqlite3.connect(path, timeout=_WAIT_S)) as database, database:
            database.execute("PRAGMA foreign_keys = ON")
            database.execute("BEGIN IMMEDIATE")
            if database.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
                for statement in filter(str.strip, _TABLES.split(";")):
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {_VERSION}")
            yield database


@contextmanager
def _alone(out_dir: Path) -> Iterator[None]:
    """One program at a time: a damaged index is replaced under nobody who is using it."""
    handle = os.open(out_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        give_up = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    text = f"the index in {out_dir}/ cannot be used: another program has it open"
                    raise RunbookError(text) from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(handle)


def _make_private(path: Path) -> None:
    """An empty file if there is none, and in any case for its owner only; never through a link."""
    if path.is_symlink():
        raise RunbookError(f"{path} is a link: the index is a file of its own; remove it")
    if path.is_dir():
        raise RunbookError(f"the index {path} cannot be used: it is a folder")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    try:
        if os.fstat(handle).st_mode & 0o777 != 0o600:
            os.fchmod(handle, 0o600)
    finally:
        os.close(handle)


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

    data = record_bytes(folder)
    digest = hashlib.sha256(data).hexdigest()
    database.execute("DELETE FROM runs WHERE folder = ?", (folder.name,))
    try:
        record = RunRecord.model_validate_json(data)
    except ValidationError as error:
        problem = f"{RECORD_FILE} is no record of this version ({error.error_count()} problems)"
        row = RunRow(folder=folder.name, run_id=folder.name, problem=problem)
        _insert(database, "runs", {**vars(row), "sha256": digest})
        return
    row = _run_row(folder.name, record)
    if record_is_changed(folder):
        # Its numbers are nobody's: no trend is drawn of them.
        row = replace(row, problem=f"{RECORD_FILE} was changed since the run: see runbook verify")
    _insert(database, "runs", {**vars(row), "sha256": digest})
    if row.problem:
        return
    for metric in _metrics(record):
        _insert(database, "metrics", {"folder": folder.name, **metric})


def _run_row(folder: str, record: RunRecord) -> RunRow:
    checks = {check.id: check for check in record.checks()}
    required = set(record.required)
    rates = (c.measurement for name, c in checks.items() if name.endswith(".throughput"))
    rate = next((one for one in rates if one and one.unit == TOKENS_PER_SECOND), None)
    return RunRow(
        folder=folder,
        run_id=record.run_id,
        profile=record.profile,
        verdict=record.verdict.value,
        said=record.said,
        scope=record.scope,
        commit_sha=record.environment.get("git.sha", ""),
        started_at=record.started_at,
        finished_at=record.finished_at,
        duration_s=sum(phase.duration_s for phase in record.phases),
        throughput=None if rate is None else _number(rate.value),
        load=_number(record.environment.get("host.load_per_cpu", "")),
        flaky=sum(len(phase.flaky) for phase in record.phases),
        interrupted=record.interrupted,
        required=len(required),
        passed=sum(name in checks and satisfies(checks[name]) for name in required),
    )


def _insert(database: sqlite3.Connection, table: str, row: dict[str, object]) -> None:
    names, marks = ", ".join(row), ", ".join("?" * len(row))
    statement = f"INSERT INTO {table} ({names}) VALUES ({marks})"  # noqa: S608 - our own words
    database.execute(statement, tuple(row.values()))


def _metrics(record: RunRecord) -> Iterator[dict[str, object]]:
    """Checks by their id; other measurements as `phase/name`."""
    for phase in record.phases:
        line, on_what = _line(record, phase)
        for name, one, check in phase.numbers():
            limit = {
                "outcome": check.outcome.value if check else "",
                "comparator": check.comparator.value if check else "",
                "bound": _number(check.limit) if check else None,
            }
            values = _values(one) if one is not None else _nothing(check.reason if check else "")
            yield {"name": name, "line": line, "on_what": on_what, **values, **limit}


def _line(record: RunRecord, phase: PhaseRecord) -> tuple[str, str]:
    """What has to be the same for two numbers of a phase to be comparable: digest and words."""
    options = {name: record.options.get(name) for name in ("steps_scale", "protocol", "aa")}
    ran = [one.model_dump(mode="json") for one in phase.ran]
    same: list[object] = [record.profile_sha256, record.settings, options, ran]
    if not ran:  # nothing trained there: the machine as preflight saw it
        same += [record.environment.get(name) for name in ("system", "gpu.names", "cpu.count")]
    text = json.dumps(same, sort_keys=True)
    devices = dict.fromkeys(f"{one.ranks} x {one.name}" for one in phase.ran)
    changed = [f"{name}={value}" for name, value in record.settings.items()]
    words = [f"profile {record.profile}", *devices, *changed]
    return hashlib.sha256(text.encode()).hexdigest()[:12], ", ".join(words)


def _number(value: object) -> float | None:
    """A finite number, from a value or the beginning of a text such as `0.2 GiB`."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value.split()[0] if isinstance(value, str) else str(value))
    except (ValueError, IndexError):
        return None
    return number if math.isfinite(number) else None


def _nothing(text: str) -> dict[str, object]:
    empty = dict.fromkeys(("number", "stdev", "low", "high"))
    return {**empty, "text": text, "unit": "", "n": 0, "path": "", "sha256": ""}


def _values(one: Measurement) -> dict[str, object]:
    low, high = one.interval or (None, None)
    return {
        "number": _number(one.value) if isinstance(one.value, int | float) else None,
        "text": str(one.value),
        "unit": one.unit,
        "n": one.n,
        "stdev": one.stdev,
        "low": low,
        "high": high,
        "path": one.path,
        "sha256": one.sha256,
    }


_OF_RUNS = ", ".join(RunRow.__dataclass_fields__)
_OF_METRICS = ", ".join(
    f"metrics.{name}" if name == "sha256" else name for name in MetricRow.__dataclass_fields__
)


def list_runs(out_dir: Path) -> list[RunRow]:
    """All runs, oldest first, after bringing the index up to date. Raises as `sync`."""
    rows = _query(out_dir, f"SELECT {_OF_RUNS} FROM runs ORDER BY started_at, folder")  # noqa: S608
    found = [RunRow(**(dict(row) | {"interrupted": bool(row["interrupted"])})) for row in rows]
    return [_as_it_is(row, out_dir) for row in found]


def _as_it_is(row: RunRow, out_dir: Path) -> RunRow:
    """One that goes on has no verdict yet, whatever its record so far would be."""
    running = running_text(out_dir / row.folder)
    return replace(row, verdict=RUNNING, said=running) if running else row


def metric_names(out_dir: Path) -> list[str]:
    """Every name that `metric_rows` knows."""
    return [row["name"] for row in _query(out_dir, "SELECT DISTINCT name FROM metrics ORDER BY 1")]


def metric_rows(out_dir: Path, name: str = "") -> list[MetricRow]:
    """One metric through all runs, oldest first; without a name every metric, by name.

    A name that occurs twice in a run is two rows. Raises as `sync`.
    """
    wanted, values = ("WHERE name = ?", (name,)) if name else ("", ())
    query = f"""SELECT {_OF_METRICS} FROM metrics JOIN runs USING (folder) {wanted}
                ORDER BY name, started_at, folder, metrics.rowid"""  # noqa: S608 - our own words
    return [MetricRow(**dict(row)) for row in _query(out_dir, query, *values)]


def _query(out_dir: Path, query: str, *values: str) -> list[sqlite3.Row]:
    """The answer of the index after bringing it up to date."""
    with _open(out_dir) as database:
        _sync(database, out_dir)
        database.row_factory = sqlite3.Row
        return database.execute(query, values).fetchall()
