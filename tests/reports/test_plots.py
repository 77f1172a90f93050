"""Which pictures a record has, that none breaks the page, and what drawing them costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reports.formats.pages import Figure, figures
from runbook.records import LaunchStatus, Mark, RunRecord, Series, Window
from tests.reports.pictures import Picture, check, estimate, points, record, series
from tests.reports.samples import entry

ANY = st.floats(allow_nan=True, allow_infinity=True)
CLASSES = {
    *("axis", "grid", "curve", "curve-2", "curve-3", "curve-4", "spread", "dot", "limit"),
    *("shade", "shade-warmup", "bar-pass", "bar-fail", "bar-warn", "text"),
}
QUICK = settings(deadline=None, max_examples=60)
HOSTILE = "<script>alert(1)</script>&\"'\x1b[2J\u202e]]>" + "x" * 500


def assert_sound(drawn: Sequence[Figure | SimpleNamespace]) -> None:
    """Well-formed, named, without colours of its own, and nothing outside of the picture."""
    for figure in drawn:
        picture = Picture(str(figure.svg()))
        assert picture.root.get("role") == "img"
        assert picture.root[0].tag == "title"
        assert picture.says
        for node in picture.root.iter():
            assert node.tag in {"svg", "title", "desc", "line", "rect", "circle", "path", "text"}
            assert node is picture.root or node.get("class", "axis") in CLASSES
            assert not {"style", "fill", "stroke", "onload"} & set(node.attrib)
            for name, most in {"x": picture.width, "y": picture.height}.items():
                for place in (name, f"{name}1", f"{name}2", f"c{name}"):
                    assert 0 <= float(node.get(place, 0.0)) <= most


@example([5e-324, 5e-324])
@example([1e308, -1e308])
@example([0.0, 1e99])
@example([math.nan])
@QUICK
@given(st.lists(ANY, min_size=1, max_size=30))
def test_any_curve_is_drawn_inside_the_picture_or_not_at_all(ys: list[float]) -> None:
    marks = [Mark(label="limit", value=ys[0])]
    spans = {
        "warmup": Window(first_step=1, last_step=1),
        "window": Window(first_step=1, last_step=9),
    }
    plain = series(ys, limits=marks, name="a")
    panels = [series(ys, name=name, group="g", **spans) for name in "bc"]
    drawn = figures(record(curves=[plain, *panels]))
    assert_sound(drawn)
    if sum(abs(y) < 1e100 for y in ys) < 2:
        assert drawn == ()


@example((math.inf, -math.inf), 5e-324)
@QUICK
@given(st.tuples(ANY, ANY), ANY)
def test_any_interval_is_drawn_inside_the_picture_or_not_at_all(
    interval: tuple[float, float], level: float
) -> None:
    assert_sound(figures(record(checks=[check(estimate(level, interval), level)])))


def test_hostile_words_are_text() -> None:
    marks = [Mark(label=HOSTILE, value=1.5)]
    curves = [series([1.0, 2.0], name=HOSTILE, group=HOSTILE, limits=marks) for _ in "ab"]
    held = check(estimate(1.0, (0.9, 1.1), unit=HOSTILE), 1.0)
    run = record(curves=curves, checks=[held])
    drawn = figures(run)
    assert {figure.kind for figure in drawn} == {HOSTILE, "interval"}
    assert_sound(drawn)
    for figure in drawn:
        assert "<script" not in str(figure.svg())
        assert "\x1b" not in figure.title + figure.caption + str(figure.svg())


# Curves, intervals and the course of a run lie where the axes say, with limits and windows.

YS = [900.0, 980.0, 1010.0, 995.0, 1005.0, 990.0]


def drawn(curves: Sequence[Series]) -> Picture:
    (one,) = figures(record(curves=curves))
    return Picture(str(one.svg()))


def paths(picture: Picture, kind: str) -> list[list[tuple[float, float]]]:
    return [points(path["d"]) for path in picture.of(kind, "path")]


def test_every_point_lies_where_the_axes_say() -> None:
    picture = drawn([series(YS)])
    (path,) = paths(picture, "curve")
    assert [picture.across(x) for x, _ in path] == pytest.approx([1, 2, 3, 4, 5, 6], abs=0.01)
    assert [picture.up(y) for _, y in path] == pytest.approx(YS, abs=0.3)


def test_a_gap_stays_a_gap() -> None:
    picture = drawn([series([1.0, 2.0, math.nan, 3.0, 1.0])])
    (path,) = picture.of("curve", "path")
    assert path["d"].count("M") == 2


INTERVAL = (0.991, 1.005)
# A tenth of a drawing unit, of about 330 for the whole scale.
CLOSE = 0.001


def interval(value: float, interval: tuple[float, float], limit: float | None = None) -> Picture:
    (one,) = figures(record(checks=[check(estimate(value, interval), limit)]))
    assert one.kind == "interval"
    return Picture(str(one.svg()))


def levels(picture: Picture) -> list[float]:
    return [picture.across(float(line["x1"])) for line in picture.of("limit", "line")]


def test_estimate_and_interval_lie_where_the_axis_says() -> None:
    picture = interval(0.998, INTERVAL, 0.95)
    (bar,) = picture.of("spread", "line")
    ends = picture.across(float(bar["x1"])), picture.across(float(bar["x2"]))
    assert ends == pytest.approx(INTERVAL, abs=CLOSE)
    (dot,) = picture.of("dot", "circle")
    assert picture.across(float(dot["cx"])) == pytest.approx(0.998, abs=CLOSE)
    assert dot["cy"] == bar["y1"]
    assert levels(picture) == pytest.approx([0.95], abs=CLOSE)
    assert picture.says == "0.998 ratio, interval 0.991 to 1.005; limit >= 0.95 ratio"


def test_a_far_limit_is_named_and_not_drawn() -> None:
    picture = interval(0.998, INTERVAL, 1e6)
    assert "limit >= 1000000 ratio (off this scale)" in picture.words()
    assert levels(picture) == []


def test_a_ratio_without_a_limit_is_held_against_equal() -> None:
    picture = interval(0.998, INTERVAL)
    assert levels(picture) == pytest.approx([1.0], abs=CLOSE)
    plain = check(estimate(47.0, (45.0, 49.0), unit="tok/s"), None)
    assert figures(record(checks=[plain])) == ()


def course(run: RunRecord) -> tuple[Figure, Picture]:
    (one,) = (figure for figure in figures(run) if figure.kind == "timeline")
    return one, Picture(str(one.svg()))


def bars(picture: Picture, kind: str) -> list[tuple[float, float, float]]:
    """Begin, end (as the axis counts) and height of every bar."""
    return [
        (
            picture.across(float(box["x"])),
            picture.across(float(box["x"]) + float(box["width"])),
            float(box["height"]),
        )
        for box in picture.of(kind, "rect")
    ]


def test_a_retried_launch_and_a_hung_one_are_seen() -> None:
    retried = entry("b", "run1", attempts=2, started_at="2026-11-21T01:01:00Z", duration_s=60.0)
    hung = entry(
        "b", "run2", status=LaunchStatus.HUNG, culprit_rank=1, duration_s=60.0,
        started_at="2026-11-21T01:02:00Z",
    )  # fmt: skip
    made = record(started_at="2026-11-21T01:00:00Z", duration_s=240.0)
    phase = made.phases[0].model_copy(update={"name": "b", "launches": (retried, hung)})
    made = made.model_copy(update={"started_at": "2026-11-21T01:00:00Z", "phases": (phase,)})
    shown, picture = course(made)
    assert bars(picture, "bar-warn")[0][:2] == pytest.approx((0.0, 60.0), abs=1)
    assert bars(picture, "bar-fail")[0][:2] == pytest.approx((60.0, 120.0), abs=1)
    assert picture.says == "b 4 min 00 s, run1 2 attempts, run2 hung, rank 1"
    assert shown.caption == "4 min 00 s in 1 phases; thin bars: launches."
