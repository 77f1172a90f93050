"""Every number of a run that a check or a phase rests on, and the run's numbers as CSV."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import asdict, dataclass, fields
from datetime import datetime

from runbook.records import Check, Measurement, RunRecord
from runbook.records.measurement import plain_number


@dataclass(frozen=True, kw_only=True)
class Number:
    """One number: `name` is a check's id, or phase/measurement, as `runbook history` has it.

    `measurement` names what was measured, `outcome` is the check's (empty without a check), and
    `limit` is a number that the value was held against by `comparator`. The windows are steps.
    """

    name: str
    phase: str
    measurement: str
    outcome: str
    required: bool
    value: float
    unit: str
    stdev: float | None
    low: float | None
    high: float | None
    n: int
    comparator: str
    limit: float | None
    first_step: int | None
    last_step: int | None
    path: str
    sha256: str


def numbers_of(record: RunRecord) -> list[Number]:
    """The numbers of all checks and measurements, in the order of the phases; texts are no numbers.

    A measurement that a check already shows does not come twice.
    """
    found = []
    for phase in record.phases:
        shown = [(check.id, check.measurement, check) for check in phase.checks]
        held = {check.measurement for check in phase.checks if check.measurement}
        others = [
            (f"{phase.name}/{one.name}", one, None) for one in phase.measurements if one not in held
        ]
        for name, one, check in (*shown, *others):
            if one is not None and _is_number(one.value):
                found.append(_number(name, phase.name, one, check))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(name: str, phase: str, one: Measurement, check: Check | None) -> Number:
    low, high = one.interval or (None, None)
    limit = check.limit if check else None
    return Number(
        name=name,
        phase=phase,
        measurement=one.name,
        outcome=check.outcome.value if check else "",
        required=bool(check and check.required),
        value=float(one.value),
        unit=one.unit,
        stdev=one.stdev,
        low=low,
        high=high,
        n=one.n,
        comparator=check.comparator.value if check and _is_number(limit) else "",
        limit=float(limit) if limit is not None and _is_number(limit) else None,
        first_step=one.window.first_step if one.window else None,
        last_step=one.window.last_step if one.window else None,
        path=one.path,
        sha256=one.sha256,
    )


def duration_s(record: RunRecord) -> float | None:
    """Seconds from the start of the run to its end; None if it has none yet."""
    if record.finished_at is None:
        return None
    begun, ended = (
        datetime.fromisoformat(text) for text in (record.started_at, record.finished_at)
    )
    return (ended - begun).total_seconds()


_RUN = ("run_id", "started_at", "profile", "verdict")


def csv_text(record: RunRecord) -> str:
    """One row for each number, after a header; NaN and infinities are words, absent cells empty."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow((*_RUN, *(field.name for field in fields(Number))))
    run = (record.run_id, record.started_at, record.profile, record.verdict.value)
    for number in numbers_of(record):
        writer.writerow((*run, *(_cell(value) for value in asdict(number).values())))
    return stream.getvalue()


def _cell(value: str | float | bool | None) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    return plain_number(value)
