"""Which pictures a record has, that none breaks the page, and what drawing them costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree import ElementTree

from hypothesis import example, given, settings
from hypothesis import strategies as st

from reports.formats.pages import Figure, figures
from runbook.records import Comparator, Mark, Window
from tests.factory.records import check
from tests.reports import samples
from tests.reports.samples import pictured, series

ANY = st.floats(allow_nan=True, allow_infinity=True)
CLASSES = {
    *("axis", "grid", "curve", "curve-2", "curve-3", "curve-4", "spread", "dot", "limit"),
    *("shade", "shade-warmup", "bar-pass", "bar-fail", "bar-warn", "text"),
}
QUICK = settings(deadline=None, max_examples=60)


def assert_sound(drawn: Sequence[Figure]) -> None:
    """Well-formed, named, without colours of its own, and nothing outside of the picture."""
    for figure in drawn:
        root = ElementTree.fromstring(str(figure.svg()))
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        assert root.get("role") == "img" and root[0].tag == "title" and root.findtext("desc")
        for node in root.iter():
            assert node.tag in {"svg", "title", "desc", "line", "rect", "circle", "path", "text"}
            assert node is root or node.get("class", "axis") in CLASSES
            assert not {"style", "fill", "stroke", "onload"} & set(node.attrib)
            for name, most in {"x": width, "y": height}.items():
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
    drawn = figures(pictured(curves=[plain, *panels]))
    assert_sound(drawn)
    if sum(abs(y) < 1e100 for y in ys) < 2:
        assert drawn == ()


def test_curves_of_a_group_share_a_picture_and_others_have_their_own() -> None:
    curves = [series([1.0, 2.0], name=name) for name in "ab"]
    curves += [series([1.0, 2.0], name=name, group="g") for name in "cd"]
    assert [one.kind for one in figures(pictured(curves=curves))] == ["trace", "trace", "g"]


@example((math.inf, -math.inf), 5e-324)
@QUICK
@given(st.tuples(ANY, ANY), ANY)
def test_any_interval_is_drawn_inside_the_picture_or_not_at_all(
    interval: tuple[float, float], level: float
) -> None:
    measured = samples.measured(level, "ratio", "phase/run/training.csv", interval=interval)
    limit = {"comparator": Comparator.AT_LEAST, "limit": level, "limit_source": "here"}
    held = check("sweep.x", measurement=measured, **limit)
    assert_sound(figures(pictured(checks=[held])))
