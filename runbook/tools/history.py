"""The runs of a folder as rows, read from each run.json, and every number through the runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from runbook.engine.intact import doubt, untrusted
from runbook.errors import RunbookError
from runbook.folder import RECORD_FILE, run_folders
from runbook.folder.journal import RUNNING, running_text
from runbook.folder.manifest import load_record
from runbook.records import RunRecord, satisfies
from runbook.records.measurement import TOKENS_PER_SECOND
from runbook.tools.export import MetricRow, metrics_of

_AS_RECORDED = ("run_id", "profile", "started_at", "interrupted")


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run in the list; `problem` says what is wrong with its run.json, if anything is.

    `throughput` is the first row `PHASE.throughput` in tok/s, None without one, `flaky` how many
    launches needed a second attempt.
    """

    folder: str
    problem: str = ""
    run_id: str
    profile: str = ""
    verdict: str = ""
    said: str = ""
    commit_sha: str = ""
    started_at: str = ""
    duration_s: float | None = None
    throughput: float | None = None
    flaky: int = 0
    interrupted: bool = False
    required: int = 0
    passed: int = 0

    @property
    def marks(self) -> tuple[str, ...]:
        """What a reader of the list should know besides the verdict."""
        flaky = f"FLAKY ({self.flaky})" if self.flaky else ""
        cut = "interrupted" if self.interrupted else ""
        return tuple(text for text in (self.problem, cut, flaky) if text)


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
    # Checks and numbers of such a record are nobody's: none is counted.
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
