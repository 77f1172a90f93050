"""Memory in pictures: GiB where a number is that large, as beside the picture."""

from __future__ import annotations

from collections.abc import Sequence

from runbook.records import Compared, Comparison, Mark, Series, Span
from runbook.records.measurement import MIB_PER_GIB, Measurement

_SMALL, _LARGE = "MiB", "GiB"


def compared_in_gib(comparison: Comparison) -> Comparison:
    """The comparison in GiB, if it is one in MiB of which a number or a level reaches 1 GiB."""
    numbers = [
        number
        for row in comparison.rows
        for number in (*row.values, row.measurement.value, *(row.measurement.interval or ()))
    ]
    if not _are_large(comparison.unit, numbers, comparison.limits):
        return comparison
    reference, margin = comparison.reference, comparison.margin
    return comparison.model_copy(
        update={
            "unit": _LARGE,
            "rows": tuple(map(_row, comparison.rows)),
            "reference": reference and _mark(reference),
            "margin": margin
            and Span(label=margin.label, low=_gib(margin.low), high=_gib(margin.high)),
            "limits": tuple(map(_mark, comparison.limits)),
        }
    )


def curves_in_gib(curves: Sequence[Series]) -> tuple[Series, ...]:
    """The curves of one picture in GiB, if they are in MiB and a point or a level reaches 1 GiB."""
    if not any(_are_large(one.unit, [y for _, y in one.points], one.limits) for one in curves):
        return tuple(curves)
    return tuple(
        one.model_copy(
            update={
                "unit": _LARGE,
                "points": tuple((x, _gib(y)) for x, y in one.points),
                "limits": tuple(map(_mark, one.limits)),
            }
        )
        for one in curves
    )


def _are_large(unit: str, numbers: Sequence[object], levels: Sequence[Mark]) -> bool:
    held = [*numbers, *(mark.value for mark in levels)]
    return unit == _SMALL and any(
        isinstance(one, int | float) and one >= MIB_PER_GIB for one in held
    )


def _gib(mib: float) -> float:
    return mib / MIB_PER_GIB


def _mark(mark: Mark) -> Mark:
    return Mark(label=mark.label, value=_gib(mark.value))


def _row(row: Compared) -> Compared:
    return row.model_copy(
        update={"values": tuple(map(_gib, row.values)), "measurement": _measured(row.measurement)}
    )


def _measured(one: Measurement) -> Measurement:
    """Unit, value, spread and interval; the files are the same."""
    value = _gib(one.value) if isinstance(one.value, int | float) else one.value
    return one.model_copy(
        update={
            "unit": one.unit.replace(_SMALL, _LARGE),
            "value": value,
            "stdev": None if one.stdev is None else _gib(one.stdev),
            "interval": one.interval and (_gib(one.interval[0]), _gib(one.interval[1])),
        }
    )
