"""The interval drawn is the one that decided, on a scale that the labels tell."""

from __future__ import annotations

import pytest

from reports.plots import draw, figures
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


def test_the_interval_drawn_is_the_one_that_decided() -> None:
    assert bar(drawn(sizes())) == pytest.approx(INTERVAL, abs=CLOSE)


def test_a_standard_deviation_changes_nothing_in_the_drawing() -> None:
    assert bar(drawn(sizes(stdev=0.3))) == pytest.approx(INTERVAL, abs=CLOSE)


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


def test_rows_share_one_scale() -> None:
    other = Compared(label="other", values=(), measurement=estimate(1.5, (1.4, 1.6)))
    picture = drawn(sizes(), other)
    assert bar(picture, 0) == pytest.approx(INTERVAL, abs=0.003)
    assert bar(picture, 1) == pytest.approx((1.4, 1.6), abs=0.003)


def test_a_far_limit_is_named_and_not_drawn() -> None:
    far, near = Mark(label="floor", value=1e6), Mark(label="floor", value=0.95)
    picture = drawn(sizes(), limits=[far])
    assert "floor: 1000000 (off this scale)" in picture.words()
    assert len(picture.of("limit", "line")) == 1, "the swatch of the key alone"
    picture = drawn(sizes(), limits=[near])
    at = [picture.across(float(line["x1"])) for line in picture.of("limit", "line")[1:]]
    assert at == pytest.approx([0.95], abs=CLOSE)


def test_a_limit_has_its_unit_and_a_ratio_none() -> None:
    limit = Mark(label="limit of each rank", value=819.0)
    words = drawn(sizes(), limits=[limit], unit="MiB").words()
    assert "limit of each rank: 819 MiB (off this scale)" in words
    assert "equal: 1" in drawn(sizes()).words()


def test_large_memory_is_in_gib_as_the_numbers_beside_it() -> None:
    """Rows, interval, level and axis; the record keeps MiB."""
    small, large = (
        Compared(
            label=label, values=(value,), measurement=estimate(value, (value - 256, value + 256))
        )
        for label, value in (("rank 0", 512.0), ("rank 1", 3072.0))
    )
    limits = [Mark(label="limit", value=2048.0)]
    picture = drawn(small, large, limits=limits, reference=None, unit="MiB")
    assert {"GiB", "limit: 2 GiB", "0.5 (0.25 to 0.75)", "3 (2.75 to 3.25)"} <= set(picture.words())
    assert bar(picture, 1) == pytest.approx((2.75, 3.25), abs=0.02)
    assert "rank 1: 3 GiB, interval 2.75 to 3.25; " in picture.says
    assert "MiB" not in picture.says
    assert "512 MiB" in drawn(small, reference=None, unit="MiB").says


def test_it_says_in_words_what_it_shows() -> None:
    says = drawn(sizes(), margin=(0.98, 1.02)).says
    assert says.startswith("50 MB against 25 MB: ratio 0.998, interval 0.991 to 1.005; TIE; ")
    assert "within 2%: 0.98 to 1.02" in says


def test_what_does_not_decide_says_so() -> None:
    beside = sizes().model_copy(update={"decides": False})
    assert "does not decide" in drawn(beside).says
    assert "does not decide" not in drawn(sizes()).says


@pytest.mark.parametrize(
    ("unit", "says"),
    [
        ("ratio", "ratio of speeds: above 1 the first one named is faster"),
        ("E", "scaling efficiency E: at 1 every rank is as fast as one alone"),
        ("share", "as a share: 0.1 is 10 %"),
        ("tok/s", "tokens per second (tok/s)"),
        ("MiB", "MiB"),
    ],
)
def test_the_axis_says_what_it_counts_in_full(unit: str, says: str) -> None:
    picture = drawn(sizes(), unit=unit)
    assert says in picture.words()
    assert draw.CHAR * len(says) <= draw.WIDTH


def test_the_caption_says_what_a_tie_is_and_what_decides_nothing() -> None:
    def caption(*rows: Compared) -> str:
        (_, one) = figures(record(comparisons=[comparison(rows)], duration_s=1.0))
        return one.caption

    assert "TIE: none is shown to be faster." in caption(sizes())
    assert "Shown only" not in caption(sizes())
    beside = sizes().model_copy(update={"decides": False})
    assert "Shown only: it does not decide here." in caption(beside)
    assert "Shown only" not in caption(sizes(), beside)


def test_too_few_rounds_have_no_bar() -> None:
    few = Compared(label="a", values=(1.0, 1.1), measurement=estimate(1.05))
    picture = drawn(few)
    assert picture.of("spread", "line") == []
    assert len(picture.of("dot", "circle")) == 3


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
