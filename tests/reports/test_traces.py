"""Curves lie where the axes say, on one scale, with warm-up, window and limits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from reports.plots import figures
from runbook.records import Mark, Series
from tests.reports.pictures import Picture, points, record, series

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


def test_four_ranks_have_a_color_each_and_of_more_the_others_share_the_last() -> None:
    def ranks(count: int) -> list[Series]:
        return [
            series([10.0 + rank, 20.0 + rank, 30.0 + rank], name=f"rank {rank}", group="memory")
            for rank in range(count)
        ]

    def key(picture: Picture) -> list[str]:
        return [words for words in picture.words() if "rank" in words or "others" in words]

    kinds = ("curve", "curve-2", "curve-3", "curve-4")
    few, many = drawn(ranks(4)), drawn(ranks(8))
    assert [len(few.of(kind, "path")) for kind in kinds] == [1, 1, 1, 1]
    assert key(few) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert [len(many.of(kind, "path")) for kind in kinds] == [1, 1, 1, 5]
    assert key(many) == ["rank 0", "rank 1", "rank 2", "5 others"]
    assert [many.up(y) for _, y in paths(many, "curve-4")[-1]] == pytest.approx(
        [17, 27, 37], abs=0.1
    )


def test_a_curve_of_an_older_record_keeps_its_limit() -> None:
    old = series(YS).model_dump(mode="json", exclude={"group", "label", "warmup", "window"})
    del old["limits"]
    found = Series.model_validate({**old, "limit": 890.0})
    assert found.limits == (Mark(label="limit", value=890.0),)
    assert Series.model_validate({**old, "limit": None}).limits == ()
