"""The numbers of a run, and through the runs of a folder: as rows, as CSV, and for Prometheus."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from runbook.engine.derive import doubt, untrusted
from runbook.errors import RunbookError, short_caveat
from runbook.folder import RECORD_FILE, RUNNING, run_folders, running_text
from runbook.folder.launch.shapes import is_any_number
from runbook.folder.manifest import load_record
from runbook.records import Check, Measurement, RunRecord, Verdict, satisfies
from runbook.records.measurement import TOKENS_PER_SECOND, plain_number

_Sample = tuple[dict[str, str], float]


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """A number of one run, of a check or of a measurement, or the text in the place of one.

    `name` is a check's id, or phase/measurement. `measurement` names what was measured, `outcome`
    is the check's (empty without a check), and `limit` is a number that the value was held against
    by `comparator`. The windows are steps. What is no number, a text or a missing value, is None.
    `on_what` names the devices of the phase and the settings of the run.
    """

    run_id: str
    started_at: str
    profile: str
    verdict: str
    name: str
    phase: str
    measurement: str = ""
    outcome: str = ""
    required: bool = False
    value: float | None = None
    unit: str = ""
    stdev: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    comparator: str = ""
    limit: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    path: str = ""
    sha256: str = ""
    on_what: str
    text: str


def metrics_of(record: RunRecord) -> Iterator[MetricRow]:
    """Checks by their id, other measurements as `phase/name`, in the order of the phases.

    A measurement that a check already shows does not come twice.
    """
    for phase in record.phases:
        devices = dict.fromkeys(f"{one.ranks} x {one.name}" for one in phase.ran)
        changed = [f"{name}={value}" for name, value in record.settings.items()]
        for name, one, check in phase.numbers():
            yield MetricRow(
                run_id=record.run_id,
                started_at=record.started_at,
                profile=record.profile,
                verdict=record.verdict.value,
                name=name,
                phase=phase.name,
                on_what=", ".join([*devices, *changed]),
                text=str(one.value) if one else check.reason if check else "",
                **dict(_of_check(check)),
                **dict(_of_value(one)),
            )


def numbers_of(record: RunRecord) -> list[MetricRow]:
    """Those that are numbers."""
    return [one for one in metrics_of(record) if one.value is not None]


def _of_check(check: Check | None) -> Iterator[tuple[str, Any]]:
    if check is None:
        return
    yield "outcome", check.outcome.value
    yield "required", check.required
    if (limit := _number(check.limit)) is not None:
        yield "limit", limit
        yield "comparator", check.comparator.value


def _of_value(one: Measurement | None) -> Iterator[tuple[str, Any]]:
    if one is None:
        return
    yield "measurement", one.name
    yield "value", _number(one.value)
    for name in ("unit", "stdev", "n", "path", "sha256"):
        yield name, getattr(one, name)
    if one.interval:
        yield from zip(("low", "high"), one.interval, strict=True)
    if one.window:
        yield from one.window.model_dump().items()


def _number(value: Any) -> float | None:
    return float(value) if is_any_number(value) else None


# What a table of numbers has no need of.
_TOLD_ONLY = ("on_what", "text")
_COLUMNS = tuple(one.name for one in fields(MetricRow) if one.name not in _TOLD_ONLY)


def csv_text(rows: Iterable[MetricRow]) -> str:
    """A header and the rows; NaN and infinities are words, absent cells empty."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows([_cell(getattr(row, name)) for name in _COLUMNS] for row in rows)
    return stream.getvalue()


def _cell(value: str | float | bool | None) -> str:
    if value is None:
        return ""
    finite = isinstance(value, float) and math.isfinite(value)
    return repr(value) if finite else plain_number(value)


def prometheus_text(record: RunRecord) -> str:
    """The run's verdict, required checks and numbers as gauges, in the text exposition format.

    The run's id is a label of one metric only, so that a run a night does not make new series of
    all the others. Raises RunbookError without the package prometheus-client.
    """
    try:
        from prometheus_client import CollectorRegistry, Gauge, generate_latest
    except ImportError as error:
        raise RunbookError(
            f"a .prom file needs the package prometheus-client ({error}); "
            "pip install 'nsa-runbook[prometheus]'"
        ) from error

    registry = CollectorRegistry()
    for name, help, samples in _families(record):
        names = list(samples[0][0]) if samples else []
        gauge = Gauge(f"runbook_{name}", help, names, registry=registry if samples else None)
        for labels, value in reversed(samples):  # of equal series the first one stays
            (gauge.labels(**labels) if labels else gauge).set(value)
    return generate_latest(registry).decode()


def _families(record: RunRecord) -> Iterable[tuple[str, str, list[_Sample]]]:
    """Name, help and samples of each gauge."""
    about = {"run_id": record.run_id, "profile": record.profile, "scope": record.scope}
    about |= {"said": record.said, "version": record.tool_version}
    verdicts = [({"verdict": one.value}, float(one is record.verdict)) for one in Verdict]
    end = datetime.fromisoformat(record.finished_at).timestamp() if record.finished_at else None
    numbers = numbers_of(record)
    yield "run_info", "The run that the other metrics are about.", [(about, 1.0)]
    yield "verdict", "1 for the verdict of the run, 0 for the others.", verdicts
    required = [({"check": name}, float(passed)) for name, passed in _required(record).items()]
    yield "required_check_passed", "1 if satisfied as a GO needs it, else 0.", required
    yield "end_timestamp_seconds", "When it ended.", [] if end is None else [({}, end)]
    # Several launches may give one measurement each: the file tells their series apart.
    values = _samples(numbers, "value", "name", "measurement", "unit", "path")
    yield "value", "A number of a check, or of a phase; the label unit says in what.", values
    limits = _samples(numbers, "limit", "name", "comparator", "unit")
    yield "limit", "The number that a check holds its value against.", limits


def _samples(numbers: Iterable[MetricRow], field: str, *labels: str) -> list[_Sample]:
    """A field of those that have it, under labels."""
    return [
        ({name: getattr(one, name) for name in labels}, getattr(one, field))
        for one in numbers
        if getattr(one, field) is not None
    ]


def _required(record: RunRecord) -> dict[str, bool]:
    """Of each required check: is it there, and every row of it satisfied?"""
    rows = record.checks()
    there, failed = {one.id for one in rows}, {one.id for one in rows if not satisfies(one)}
    return {name: name in there - failed for name in record.required}


_AS_RECORDED = ("run_id", "profile", "caveats", "started_at", "interrupted")


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
    caveats: tuple[str, ...] = ()
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
        caveats = map(short_caveat, self.caveats)
        return tuple(text for text in (self.problem, cut, *caveats, flaky) if text)


def read_history(out_dir: Path) -> tuple[list[RunRow], list[MetricRow]]:
    """The runs of a folder, oldest first, and their numbers in the same order; a link is none.

    Raises OSError if a folder cannot be read.
    """
    folders = [folder for folder in run_folders(out_dir) if not folder.is_symlink()]
    read = sorted(map(_read, folders), key=lambda one: (one[0].started_at, one[0].folder))
    return [run for run, _ in read], [row for _, rows in read for row in rows]


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
    required = _required(record)
    rates = (one.measurement for one in record.checks() if one.id.endswith(".throughput"))
    rate = next((one for one in rates if one and one.unit == TOKENS_PER_SECOND), None)
    # One that goes on has no verdict yet, whatever its record so far would be.
    running = running_text(folder)
    return RunRow(
        folder=folder.name,
        verdict=RUNNING if running else record.verdict.value,
        said=running or record.said,
        commit_sha=record.environment.get("git.sha", ""),
        duration_s=sum(phase.duration_s for phase in record.phases),
        throughput=None if rate is None else _number(rate.value),
        flaky=sum(len(phase.flaky) for phase in record.phases),
        required=len(required),
        passed=sum(required.values()),
        **{name: getattr(record, name) for name in _AS_RECORDED},
    )
