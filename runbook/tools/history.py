"""The runs of a folder as rows, read from each run.json, and every number through the runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from runbook.engine.intact import doubt, untrusted
from runbook.errors import RunbookError
from runbook.folder import RECORD_FILE, RUNNING, run_folders, running_text
from runbook.folder.manifest import load_record
from runbook.records import RunRecord, satisfies
from runbook.records.measurement import TOKENS_PER_SECOND
from runbook.tools.export import MetricRow, metrics_of

# Half of the processors busy with something else, as preflight's row of host settings has it.
BUSY_LOAD = 0.5
_AS_RECORDED = ("run_id", "profile", "scope", "started_at", "finished_at", "interrupted")


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
class History:
    """The runs of a folder, oldest first, and their numbers in the same order."""

    runs: tuple[RunRow, ...]
    metrics: tuple[MetricRow, ...]

    def metric(self, name: str) -> list[MetricRow]:
        """One metric through all runs; a name that occurs twice in a run is two rows."""
        return [row for row in self.metrics if row.name == name]

    @property
    def names(self) -> list[str]:
        """Every metric that a run has."""
        return sorted({row.name for row in self.metrics})


def read_history(out_dir: Path) -> History:
    """Read every run of a folder; a link is none. Raises OSError if a folder cannot be read."""
    folders = [
        folder
        for folder in run_folders(out_dir)
        if (folder / RECORD_FILE).is_file() and not folder.is_symlink()
    ]
    read = sorted(map(_read, folders), key=lambda one: (one[0].started_at, one[0].folder))
    metrics = (row for _, rows in read for row in rows)
    return History(runs=tuple(run for run, _ in read), metrics=tuple(metrics))


def _read(folder: Path) -> tuple[RunRow, list[MetricRow]]:
    try:
        record = load_record(folder)
    except RunbookError as error:
        problem = str(error).removeprefix(f"{folder}/")
        return RunRow(folder=folder.name, run_id=folder.name, problem=problem), []
    why = doubt(folder, record)
    if not why:
        return _run_row(folder, record), list(metrics_of(record))
    # Checks and numbers of such a record are nobody's: none is counted, no trend is drawn.
    told = untrusted(record, why).model_copy(update={"phases": ()})
    problem = f"{RECORD_FILE} {why}: see runbook verify"
    return replace(_run_row(folder, told), problem=problem, duration_s=None), []


def _run_row(folder: Path, record: RunRecord) -> RunRow:
    checks = {check.id: check for check in record.checks()}
    required = set(record.required)
    rates = (c.measurement for name, c in checks.items() if name.endswith(".throughput"))
    rate = next((one for one in rates if one and one.unit == TOKENS_PER_SECOND), None)
    # One that goes on has no verdict yet, whatever its record so far would be.
    running = running_text(folder)
    return RunRow(
        folder=folder.name,
        verdict=RUNNING if running else record.verdict.value,
        said=running or record.said,
        commit_sha=record.environment.get("git.sha", ""),
        duration_s=sum(phase.duration_s for phase in record.phases),
        throughput=None if rate is None else _finite(rate.value),
        load=_finite(record.environment.get("host.load_per_cpu")),
        flaky=sum(len(phase.flaky) for phase in record.phases),
        required=len(required),
        passed=sum(name in checks and satisfies(checks[name]) for name in required),
        **{name: getattr(record, name) for name in _AS_RECORDED},
    )


def _finite(value: object) -> float | None:
    """The number, or the one that a text is, if it is finite."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True, kw_only=True)
class Trend:
    """A metric's comparable values, oldest first: the same profile, settings, work and devices.

    `path` is the file that a measurement is from, since every launch may give one of that name; a
    check has one number a run, whatever files it is from.
    """

    name: str
    unit: str
    on_what: str
    line: str
    rows: tuple[MetricRow, ...]
    path: str = ""

    @property
    def title(self) -> str:
        """What is on the line: `baseline/loss: profile cpu, 2 x AMD EPYC, run1/training.csv`."""
        return ", ".join(text for text in (f"{self.name}: {self.on_what}", self.path) if text)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values of the runs that have one."""
        return tuple(row.number for row in self.rows if row.number is not None)

    def changes(self) -> list[tuple[float, int] | None]:
        """For each row: the change against the median of the earlier ones as a share, and of how
        many; None without a number, an earlier one, or a median to divide by."""
        found: list[tuple[float, int] | None] = []
        before: list[float] = []
        for row in self.rows:
            middle = median(before) if before else 0.0
            known = row.number is not None and middle != 0.0
            found.append((row.number / middle - 1, len(before)) if known and row.number else None)
            before += [] if row.number is None else [row.number]
        return found


def trends(rows: Sequence[MetricRow]) -> list[Trend]:
    """The rows of one or more metrics, split into lines; the one with the newest run comes last."""
    lines: dict[tuple[str, str, str], list[MetricRow]] = {}
    for row in rows:
        lines.setdefault((row.name, row.line, _launch_of(row)), []).append(row)
    found = [
        Trend(
            name=name,
            unit=next((row.unit for row in reversed(kept) if row.number is not None), ""),
            on_what=kept[-1].on_what,
            line=line,
            rows=tuple(kept),
            path=path,
        )
        for (name, line, path), kept in lines.items()
    ]
    return sorted(found, key=lambda trend: (trend.name, trend.rows[-1].started_at, trend.path))


def _launch_of(row: MetricRow) -> str:
    """The file of a measurement, named `phase/measurement`; nothing for a check."""
    return row.path if "/" in row.name else ""
