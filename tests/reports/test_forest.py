"""The interval drawn is the one that decided, on a scale that the labels tell."""

from __future__ import annotations

import pytest

from reports.plots import figures
from runbook.records import Compared, Comparison, Mark
from tests.reports.pictures import Picture, check, comparison, estimate, record

ROUNDS = (0.97, 1.03, 0.99, 1.012)
INTERVAL = (0.991, 1.005)
# A tenth of a drawing unit, of about 330 for the whole scale.
CLOSE = 0.001


def drawn(*rows: Compared, **more: object) -> Picture:
    compared = comparison(rows, **more)  # type: ignore[arg-type]
    (one,) = (
        figure for figure in figures(record(comparisons=[compared])) if figure.kind == "comparison"
    )
    return Picture(str(one.svg))


def sizes(stdev: float | None = None) -> Compared:
    measurement = estimate(0.998, INTERVAL, stdev=stdev)
    return Compared(label="50 MB against 25 MB", values=ROUNDS, measurement=measurement)


def bar(picture: Picture, number: int = 0) -> tuple[float, float]:
    line = picture.of("spread", "line")[number]
    return picture.across(float(line["x1"])), picture.across(float(line["x2"]))


def test_every_round_is_a_dot_in_its_order_and_the_estimate_a_larger_one() -> None:
    picture = drawn(sizes())
    dots = picture.of("dot", "circle")
    small = [dot for dot in dots if float(dot["r"]) < 3]
    assert [picture.across(float(dot["cx"])) for dot in small] == pytest.approx(ROUNDS, abs=CLOSE)
    heights = [float(dot["cy"]) for dot in small]
    assert heights == sorted(set(heights))
    (large,) = (dot for dot in dots if float(dot["r"]) > 3)
    assert picture.across(float(large["cx"])) == pytest.approx(0.998, abs=CLOSE)
    assert large["cy"] == picture.of("spread", "line")[0]["y1"]


def test_one_and_the_margin_stand_where_the_labels_say() -> None:
    picture = drawn(sizes(), margin=(0.98, 1.02))
    wide = [box for box in picture.of("band", "rect") if float(box["height"]) > 10]
    (margin,) = wide
    ends = float(margin["x"]), float(margin["x"]) + float(margin["width"])
    assert [picture.across(x) for x in ends] == pytest.approx([0.98, 1.02], abs=CLOSE)
    upright = [
        float(line["x1"])
        for line in picture.of("axis", "line")
        if line["x1"] == line["x2"] and float(line["y2"]) - float(line["y1"]) > 20
    ]
    assert [picture.across(x) for x in upright] == pytest.approx([1.0], abs=CLOSE)


def test_a_far_limit_is_named_and_not_drawn() -> None:
    far, near = Mark(label="floor", value=1e6), Mark(label="floor", value=0.95)
    picture = drawn(sizes(), limits=[far])
    assert "floor: 1000000 (off this scale)" in picture.words()
    assert len(picture.of("limit", "line")) == 1, "the swatch of the key alone"
    picture = drawn(sizes(), limits=[near])
    at = [picture.across(float(line["x1"])) for line in picture.of("limit", "line")[1:]]
    assert at == pytest.approx([0.95], abs=CLOSE)


def test_a_check_with_an_interval_and_a_limit_is_drawn_unless_its_rounds_are() -> None:
    held = check(estimate(47.0, (45.0, 49.0)), 39.0)
    (_, one) = [*figures(record(checks=[held], duration_s=1.0))]
    assert one.kind == "interval"
    assert bar(Picture(str(one.svg))) == pytest.approx((45.0, 49.0), abs=0.05)
    assert "limit (>=): 39" in Picture(str(one.svg)).says
    compared: Comparison = comparison([sizes()]).model_copy(update={"check": held.id})
    kinds = [figure.kind for figure in figures(record(checks=[held], comparisons=[compared]))]
    assert kinds == ["comparison"]


@pytest.mark.parametrize("limit", [None, True, "yes"])
def test_a_check_without_a_limit_that_is_a_number_is_not_drawn(limit: object) -> None:
    held = check(estimate(47.0, (45.0, 49.0)), 39.0).model_copy(update={"limit": limit})
    assert figures(record(checks=[held])) == ()
