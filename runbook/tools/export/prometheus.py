"""A run as a file for node_exporter's textfile collector (the text exposition format)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from runbook.records import Outcome, RunRecord, Verdict, satisfies
from runbook.tools.export.numbers import Number, duration_s, numbers_of

Sample = tuple[Mapping[str, str], float]


def prometheus_text(record: RunRecord) -> str:
    """The run's verdict, checks, times and numbers as gauges.

    The run's id is a label of one metric only, so that a run a night does not make new series of
    all the others.
    """
    numbers = numbers_of(record)
    families = (
        _family(
            "runbook_run_info",
            "The run that the other metrics are about, and what its verdict is about.",
            [(_about(record), 1)],
        ),
        _family(
            "runbook_verdict",
            "1 for the verdict of the run, 0 for the others.",
            [({"verdict": one.value}, float(one is record.verdict)) for one in Verdict],
        ),
        _family("runbook_checks", "Checks of the run by outcome.", _checks(record)),
        _family(
            "runbook_required_check_passed",
            "1 if a check that the profile requires is satisfied as a GO needs it, else 0.",
            _required(record),
        ),
        _family(
            "runbook_start_timestamp_seconds", "When the run began.", _moment(record.started_at)
        ),
        _family("runbook_end_timestamp_seconds", "When it ended.", _moment(record.finished_at)),
        _family(
            "runbook_duration_seconds",
            "From its start to its end.",
            [({}, seconds) for seconds in (duration_s(record),) if seconds is not None],
        ),
        _family(
            "runbook_phase_duration_seconds",
            "Time of each phase that ran.",
            [({"phase": one.name}, one.duration_s) for one in record.phases if one.started_at],
        ),
        _family(
            "runbook_value",
            "A number of a check, or of a phase; the label unit says in what.",
            _values(numbers),
        ),
        _family(
            "runbook_limit",
            "The number that a check holds its value against.",
            [
                ({"name": one.name, "comparator": one.comparator, "unit": one.unit}, one.limit)
                for one in numbers
                if one.limit is not None
            ],
        ),
    )
    return "".join(families)


def _about(record: RunRecord) -> dict[str, str]:
    about = {"run_id": record.run_id, "profile": record.profile, "scope": record.scope}
    return about | {"said": record.said, "version": record.tool_version}


def _checks(record: RunRecord) -> list[Sample]:
    required = set(record.required)
    counted = Counter((check.outcome, check.id in required) for check in record.checks())
    return [
        ({"outcome": outcome.value, "required": str(flag).lower()}, counted[outcome, flag])
        for outcome in Outcome
        for flag in (True, False)
    ]


def _required(record: RunRecord) -> list[Sample]:
    found: dict[str, list[bool]] = {}
    for check in record.checks():
        found.setdefault(check.id, []).append(satisfies(check))
    return [
        ({"check": name}, float(all(found.get(name, [False]))))
        for name in dict.fromkeys(record.required)
    ]


def _moment(text: str | None) -> list[Sample]:
    return [({}, datetime.fromisoformat(text).timestamp())] if text else []


def _values(numbers: Iterable[Number]) -> list[Sample]:
    """Several launches may give one measurement each: the series tells them apart by their file."""
    return [
        (
            {"name": one.name, "measurement": one.measurement, "unit": one.unit, "path": one.path},
            one.value,
        )
        for one in numbers
    ]


def _family(name: str, help: str, samples: Sequence[Sample]) -> str:
    """A gauge with its head; nothing without samples. Of equal series the first one stays."""
    lines: dict[str, str] = {}
    for labels, value in samples:
        words = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        series = f"{name}{{{words}}}" if words else name
        lines.setdefault(series, f"{series} {_value(value)}\n")
    if not lines:
        return ""
    return f"# HELP {name} {help}\n# TYPE {name} gauge\n{''.join(lines.values())}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
