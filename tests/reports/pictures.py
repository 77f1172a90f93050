"""A drawing read back: its shapes by class, and values from places by the labels of its axes."""

from __future__ import annotations

import re
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

_FACTOR = {"k": 1e3, "M": 1e6, "G": 1e9}


class Picture:
    """A parsed SVG."""

    def __init__(self, svg: str) -> None:
        self.root = ET.fromstring(svg)
        self.width, self.height = map(float, self.root.attrib["viewBox"].split()[2:])

    def of(self, kind: str, tag: str) -> list[dict[str, str]]:
        """The attributes of every shape of a class."""
        return [node.attrib for node in self.root.iter(tag) if node.get("class") == kind]

    def words(self) -> list[str]:
        """Everything that is written in the drawing."""
        return [node.text or "" for node in self.root.iter("text")]

    @property
    def says(self) -> str:
        """The description in words."""
        return self.root.findtext("desc") or ""

    def across(self, place: float) -> float:
        """The value at this distance from the left, by the labels under the drawing."""
        texts = [(float(node.attrib["y"]), node.text or "") for node in self.root.iter("text")]
        row = max(y for y, _ in texts) - 14
        marks = sorted(
            float(line["x1"])
            for line in self.of("axis", "line")
            if line["x1"] == line["x2"] and float(line["y2"]) - float(line["y1"]) == 3
        )
        values = [_value(words) for y, words in texts if y == row]
        assert len(marks) == len(values) >= 2
        return _inverted(marks, values, place)

    def up(self, place: float) -> float:
        """The value at this height, by the labels beside the drawing."""
        ticks = [
            (float(node.attrib["y"]) - 4, _value(node.text or ""))
            for node in self.root.iter("text")
            if node.attrib["text-anchor"] == "end" and float(node.attrib["x"]) == 42
        ]
        assert len(ticks) >= 2
        return _inverted([y for y, _ in ticks], [value for _, value in ticks], place)


def _value(text: str) -> float:
    return float(text.rstrip("kMG")) * _FACTOR.get(text[-1], 1.0)


def _inverted(places: Sequence[float], values: Sequence[float], place: float) -> float:
    first, last = places[0], places[-1]
    return values[0] + (place - first) / (last - first) * (values[-1] - values[0])


def points(path: str) -> list[tuple[float, float]]:
    """The corners of a path."""
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+?) ([-\d.]+)", path)]


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
