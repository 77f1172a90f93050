"""A drawing read back, and records of one phase with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from runbook.records import (
    Check,
    Comparator,
    Mark,
    Measurement,
    Outcome,
    RunRecord,
    Series,
    Verdict,
    Window,
)
from tests.factory import records
from tests.factory.records import phase
from tests.reports.samples import digest, measured, run


class Picture:
    """A parsed SVG."""

    def __init__(self, svg: str) -> None:
        self.root = ET.fromstring(svg)
        self.width, self.height = map(float, self.root.attrib["viewBox"].split()[2:])

    @property
    def says(self) -> str:
        """The description in words."""
        return self.root.findtext("desc") or ""


def series(
    ys: Sequence[float],
    *,
    name: str = "run",
    group: str = "",
    limits: Sequence[Mark] = (),
    warmup: Window | None = None,
    window: Window | None = None,
    unit: str = "tok/s",
) -> Series:
    return Series(
        name=name,
        unit=unit,
        points=tuple((float(step), y) for step, y in enumerate(ys, start=1)),
        n=len(ys),
        group=group,
        label=name,
        limits=tuple(limits),
        warmup=warmup,
        window=window,
        path="phase/run/training.csv",
        sha256=digest("p"),
    )


def estimate(
    value: float, interval: tuple[float, float] | None = None, *, unit: str = "ratio"
) -> Measurement:
    return measured(value, unit, "phase/run/training.csv", interval=interval)


def record(*, curves: Sequence[Series] = (), **told: object) -> RunRecord:
    """A run of one phase `sweep` with these pictures."""
    made = phase(
        "sweep",
        **{"outcome": Outcome.PASS, "series": curves, **told},
    )
    return run(Verdict.GO, (made,))


def check(measurement: Measurement, limit: float | None) -> Check:
    held = {"comparator": Comparator.AT_LEAST, "limit": limit, "limit_source": "here"}
    return records.check("sweep.throughput", measurement=measurement, **held)
