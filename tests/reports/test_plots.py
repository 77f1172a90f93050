"""Drawings of the record's own numbers, and none where there is nothing to draw."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reports.plots import interval_plot, series_plot, table_plot
from runbook.records import Series, Table
from tests.reports.samples import digest, go


def series(ys: list[float], limit: float | None = None) -> Series:
    points = tuple((float(index), y) for index, y in enumerate(ys))
    return Series(
        name="x", unit="MiB", points=points, n=len(ys), limit=limit, path="p", sha256=digest("p")
    )


def numbers(svg: str, name: str, attribute: str) -> list[float]:
    return [float(node.get(attribute, "")) for node in ET.fromstring(svg).iter(name)]


def test_dots_stand_in_the_order_of_the_means() -> None:
    table = Table(
        title="t",
        columns=("arm", "mean", "stdev"),
        rows=(("a", 10.0, 1.0), ("b", 30.0, None), ("c", 20.0, 2.0), ("d", math.nan, 1.0)),
    )
    a, b, c = numbers(str(table_plot(table)), "circle", "cx")
    assert a < c < b
    assert (c - a) / (b - a) == pytest.approx(0.5, abs=0.002)


def test_tables_without_two_means_are_not_drawn() -> None:
    words = Table(title="t", columns=("fact", "meaning"), rows=(("a", 1.0), ("b", 2.0)))
    single = Table(title="t", columns=("arm", "mean"), rows=(("a", 1.0), ("b", None)))
    assert table_plot(words) == table_plot(single) == ""


def test_the_limit_lies_outside_an_interval_that_misses_it() -> None:
    check = go().phases[1].checks[0]
    svg = str(interval_plot(check))
    limit = re.search(r'class="limit" x1="([\d.]+)"', svg)
    spread = re.search(r'class="spread" x1="([\d.]+)"', svg)
    assert limit is not None and spread is not None
    assert float(limit.group(1)) < float(spread.group(1))
    assert interval_plot(check.model_copy(update={"limit": None})) == ""


def test_a_far_limit_is_named_and_not_drawn() -> None:
    near, far = str(series_plot(series([1, 2], 2.5))), str(series_plot(series([1, 2], 80_000)))
    assert 'class="limit"' in near
    assert 'class="limit"' not in far
    assert "limit 80000" in far


def test_a_gap_stays_a_gap() -> None:
    svg = str(series_plot(series([1.0, 2.0, math.nan, 3.0, 1.0])))
    path = re.search(r'd="([^"]+)"', svg)
    assert path is not None
    assert path.group(1).count("M") == 2


@example([5e-324, 5e-324])
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=40))
def test_any_curve_is_drawn_inside_the_picture_or_not_at_all(ys: list[float]) -> None:
    svg = str(series_plot(series(ys)))
    if sum(abs(y) < 1e100 for y in ys) < 2:
        assert svg == ""
        return
    path = re.search(r'd="([^"]+)"', svg)
    assert path is not None
    for x, y in re.findall(r"[ML](\S+) ([^ML]+)", path.group(1)):
        assert 0 <= float(x) <= 360
        assert 0 <= float(y) <= 140
