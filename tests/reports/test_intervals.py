"""The interval drawn is the one that decided, on a scale that the labels tell."""

from __future__ import annotations

import pytest

from reports.plots import figures
from tests.reports.pictures import Picture, check, estimate, record

INTERVAL = (0.991, 1.005)
# A tenth of a drawing unit, of about 330 for the whole scale.
CLOSE = 0.001


def drawn(value: float, interval: tuple[float, float], limit: float | None = None) -> Picture:
    (one,) = figures(record(checks=[check(estimate(value, interval), limit)]))
    assert one.kind == "interval"
    return Picture(str(one.svg()))


def levels(picture: Picture) -> list[float]:
    return [picture.across(float(line["x1"])) for line in picture.of("limit", "line")]


def test_estimate_and_interval_lie_where_the_axis_says() -> None:
    picture = drawn(0.998, INTERVAL, 0.95)
    (bar,) = picture.of("spread", "line")
    ends = picture.across(float(bar["x1"])), picture.across(float(bar["x2"]))
    assert ends == pytest.approx(INTERVAL, abs=CLOSE)
    (dot,) = picture.of("dot", "circle")
    assert picture.across(float(dot["cx"])) == pytest.approx(0.998, abs=CLOSE)
    assert dot["cy"] == bar["y1"]
    assert levels(picture) == pytest.approx([0.95], abs=CLOSE)
    assert picture.says == "0.998 ratio, interval 0.991 to 1.005; limit >= 0.95 ratio"


def test_a_far_limit_is_named_and_not_drawn() -> None:
    picture = drawn(0.998, INTERVAL, 1e6)
    assert "limit >= 1000000 ratio (off this scale)" in picture.words()
    assert levels(picture) == []


def test_a_ratio_without_a_limit_is_held_against_equal() -> None:
    picture = drawn(0.998, INTERVAL)
    assert levels(picture) == pytest.approx([1.0], abs=CLOSE)
    plain = check(estimate(47.0, (45.0, 49.0), unit="tok/s"), None)
    assert figures(record(checks=[plain])) == ()


@pytest.mark.parametrize("limit", [True, "yes"])
def test_a_check_with_a_limit_that_is_no_number_is_not_drawn(limit: object) -> None:
    held = check(estimate(47.0, (45.0, 49.0)), 39.0).model_copy(update={"limit": limit})
    assert figures(record(checks=[held])) == ()
