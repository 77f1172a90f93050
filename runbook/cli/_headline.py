"""What one line can say: the main fact of a phase, and a time."""

from __future__ import annotations

from reports.text import plain_number
from runbook.records import Check, Comparator, Measurement, Outcome, PhaseRecord

__all__ = ["headline", "short_duration"]

_RATE_UNITS = ("toks/s", "tok/s", "tokens/s")


def headline(record: PhaseRecord) -> str:
    """A throughput with sample size and limit if one was measured, and the passed checks."""
    passed = sum(check.outcome is Outcome.PASS for check in record.checks)
    shown = sum(check.outcome is not Outcome.SKIPPED for check in record.checks)
    count = f"{passed} of {shown} checks" if shown else "no checks"
    for check in record.checks:
        if check.measurement is not None and check.measurement.unit in _RATE_UNITS:
            return f"{_rate(check, check.measurement)}  {count}"
    return count


def _rate(check: Check, measured: Measurement) -> str:
    spread = f" +- {measured.stdev:.3g}" if measured.stdev is not None else ""
    text = f"{plain_number(measured.value)}{spread} {measured.unit} (n={measured.n})"
    if isinstance(check.limit, int | float) and check.comparator is not Comparator.NONE:
        text += f" {check.comparator.value} {check.limit:g}"
    return text


def short_duration(seconds: float) -> str:
    """`41 s`, `3 min 20 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
