"""Curves, intervals and the course of a run lie where the axes say, with limits and windows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from reports.formats.pages import Figure, figures
from runbook.records import LaunchStatus, PhaseRecord, RunRecord, Series
from tests.reports.pictures import Picture, check, estimate, points, record, series
from tests.reports.samples import entry

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


@pytest.mark.parametrize("limit", [True, "yes"])
def test_a_check_with_a_limit_that_is_no_number_is_not_drawn(limit: object) -> None:
    held = check(estimate(47.0, (45.0, 49.0)), 39.0).model_copy(update={"limit": limit})
    assert figures(record(checks=[held])) == ()


def course(run: RunRecord) -> tuple[Figure, Picture]:
    (one,) = (figure for figure in figures(run) if figure.kind == "timeline")
    return one, Picture(str(one.svg()))


def timed(name: str, minute: int, seconds: float, **more: object) -> PhaseRecord:
    started = f"2026-11-21T{1 + minute // 60:02d}:{minute % 60:02d}:00Z"
    (made,) = record(started_at=started, duration_s=seconds).phases
    return made.model_copy(update={"name": name, **more})


def two(*phases: PhaseRecord) -> RunRecord:
    return record().model_copy(update={"started_at": "2026-11-21T01:00:00Z", "phases": phases})


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
    shown, picture = course(two(timed("b", 0, 240.0, launches=(retried, hung))))
    assert bars(picture, "bar-warn")[0][:2] == pytest.approx((0.0, 60.0), abs=1)
    assert bars(picture, "bar-fail")[0][:2] == pytest.approx((60.0, 120.0), abs=1)
    assert picture.says == "b 4 min 00 s, run1 2 attempts, run2 hung, rank 1"
    assert shown.caption == "4 min 00 s in 1 phases; thin bars: launches."


def test_a_phase_begins_where_the_one_before_it_ended() -> None:
    later = timed("b", 0, 600.0).model_copy(update={"started_at": "2026-11-22T01:00:00Z"})
    shown, picture = course(two(timed("a", 0, 600.0), later))
    spans = [span[:2] for span in bars(picture, "bar-pass")]
    assert spans[0] == pytest.approx((0.0, 10.0), abs=0.1)
    assert spans[1] == pytest.approx((10.0, 20.0), abs=0.1)
    assert shown.caption.startswith("20 min 00 s in 2 phases")
