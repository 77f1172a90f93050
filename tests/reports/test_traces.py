"""Curves lie where the axes say, on one scale, with warm-up, window and limits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from reports.plots import figures
from runbook.records import Mark, Series, Window
from tests.reports.pictures import Picture, points, record, series

YS = [900.0, 980.0, 1010.0, 995.0, 1005.0, 990.0]


def drawn(curves: Sequence[Series]) -> Picture:
    (one,) = figures(record(curves=curves))
    return Picture(str(one.svg))


def caption(curves: Sequence[Series]) -> str:
    (one,) = figures(record(curves=curves))
    return one.caption


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


def test_launches_with_windows_get_panels_of_one_scale() -> None:
    window = Window(first_step=3, last_step=6)
    low = series(YS, name="run1", group="throughput", window=window)
    high = series([3 * y for y in YS], name="run2", group="throughput", window=window)
    picture = drawn([low, high])
    first, second = paths(picture, "curve")
    boxes = [box for box in picture.of("shade", "rect") if float(box["height"]) > 20]
    assert len(boxes) == 2
    for path, box, factor in ((first, boxes[0], 1), (second, boxes[1], 3)):
        top, bottom = float(box["y"]), float(box["y"]) + float(box["height"])
        inside = [picture.up(y, top=top, bottom=bottom) for _, y in path]
        assert inside == pytest.approx([factor * y for y in YS], abs=30)
    spread = max(y for _, y in first) - min(y for _, y in first)
    wider = max(y for _, y in second) - min(y for _, y in second)
    assert wider == pytest.approx(3 * spread, abs=0.3)


def test_window_and_warmup_are_shaded_from_their_first_to_their_last_step() -> None:
    curve = series(
        [*YS, *YS],
        warmup=Window(first_step=1, last_step=3),
        window=Window(first_step=5, last_step=12),
    )
    picture = drawn([curve])
    for kind, steps in (("shade-warmup", (1, 3)), ("shade", (5, 12))):
        (box,) = (one for one in picture.of(kind, "rect") if float(one["height"]) > 20)
        ends = float(box["x"]), float(box["x"]) + float(box["width"])
        assert [picture.across(x) for x in ends] == pytest.approx(steps, abs=0.05)
    assert any("warm-up" in words for words in picture.words())
    assert "last 50 steps" in picture.words()
    assert "warm-up steps 1-3, last-50 window steps 5-12" in picture.says


def test_a_slow_first_step_does_not_flatten_the_rest() -> None:
    curve = series([1.0, *YS], warmup=Window(first_step=1, last_step=1))
    picture = drawn([curve])
    (path,) = paths(picture, "curve")
    heights = [y for _, y in path[1:]]
    assert max(heights) - min(heights) > 80
    assert [picture.up(y) for y in heights] == pytest.approx(YS, abs=0.5)


def test_near_limits_are_labelled_lines_and_far_ones_are_named() -> None:
    limits = [Mark(label="floor", value=890.0), Mark(label="most", value=8e5)]
    picture = drawn([series(YS, limits=limits)])
    (line,) = picture.of("limit", "line")
    assert picture.up(float(line["y1"])) == pytest.approx(890.0, abs=0.5)
    assert "floor: 890 tok/s" in picture.words()
    assert not any("most" in words for words in picture.words())
    assert "Too far away to draw: most: 800000 tok/s." in caption([series(YS, limits=limits)])


def test_large_memory_is_in_gib_as_the_numbers_beside_it() -> None:
    """One level that is large is enough; else curve and level would be read in two units."""
    mib = [512.0, 768.0, 1000.0]
    assert "MiB" in drawn([series(mib, unit="MiB")]).words()
    picture = drawn([series(mib, unit="MiB", limits=[Mark(label="limit", value=1536.0)])])
    (line,) = picture.of("limit", "line")
    assert picture.up(float(line["y1"])) == pytest.approx(1.5, abs=0.01)
    assert {"GiB", "limit: 1.5 GiB"} <= set(picture.words())
    assert "0.5 to 0.9766 GiB" in picture.says


def test_labels_of_close_limits_do_not_lie_over_each_other() -> None:
    limits = [Mark(label=name, value=value) for name, value in (("a", 960.0), ("b", 961.0))]
    picture = drawn([series(YS, limits=limits)])
    (first, second) = (
        node for node in picture.root.iter("text") if (node.text or "").startswith(("a: ", "b: "))
    )
    apart_y = abs(float(first.attrib["y"]) - float(second.attrib["y"]))
    apart_x = abs(float(first.attrib["x"]) - float(second.attrib["x"]))
    assert apart_y >= 11 or apart_x >= 60


def test_up_to_four_ranks_are_curves_and_more_a_band_with_the_highest() -> None:
    def ranks(count: int) -> list[Series]:
        return [
            series([10.0 + rank, 20.0 + rank, 30.0 + rank], name=f"rank {rank}", group="memory")
            for rank in range(count)
        ]

    few = drawn(ranks(4))
    kinds = ("curve", "curve-2", "curve-3", "curve-4")
    assert [len(few.of(kind, "path")) for kind in kinds] == [1, 1, 1, 1]
    assert [words for words in few.words() if words.startswith("rank")] == [
        "rank 0", "rank 1", "rank 2", "rank 3"
    ]  # fmt: skip
    many = drawn(ranks(8))
    (band,), (top,) = paths(many, "band"), paths(many, "curve")
    assert [many.up(y) for _, y in top] == pytest.approx([17, 27, 37], abs=0.1)
    values = [many.up(y) for _, y in band]
    assert values == pytest.approx([10, 20, 30, 37, 27, 17], abs=0.1)
    assert "highest: rank 7" in many.words()


def test_a_share_is_shown_between_nothing_and_all() -> None:
    picture = drawn([series([0.98, 0.97, 0.99], unit="share", group="gates")])
    (path,) = paths(picture, "curve")
    assert [picture.up(y) for _, y in path] == pytest.approx([0.98, 0.97, 0.99], abs=0.006)
    assert {"0", "1.0"} <= set(picture.words())


def test_a_curve_of_an_older_record_keeps_its_limit() -> None:
    old = series(YS).model_dump(mode="json", exclude={"group", "label", "warmup", "window"})
    del old["limits"]
    found = Series.model_validate({**old, "limit": 890.0})
    assert found.limits == (Mark(label="limit", value=890.0),)
    assert Series.model_validate({**old, "limit": None}).limits == ()


def test_one_point_is_no_picture() -> None:
    assert figures(record(curves=[series([1.0])])) == ()
    assert figures(record(curves=[series([1.0, math.nan, math.inf])])) == ()
