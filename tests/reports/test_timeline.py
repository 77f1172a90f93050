"""The course of a run: bars as long as what they stand for, in order."""

from __future__ import annotations

import pytest

from reports.plots import Figure, figures
from runbook.records import LaunchStatus, PhaseRecord, RunRecord
from tests.reports.pictures import Picture, record
from tests.reports.samples import entry


def course(run: RunRecord) -> tuple[Figure, Picture]:
    (one,) = (figure for figure in figures(run) if figure.kind == "timeline")
    return one, Picture(str(one.svg()))


def phase(name: str, minute: int, seconds: float, **more: object) -> PhaseRecord:
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
    shown, picture = course(two(phase("b", 0, 240.0, launches=(retried, hung))))
    assert bars(picture, "bar-warn")[0][:2] == pytest.approx((0.0, 60.0), abs=1)
    assert bars(picture, "bar-fail")[0][:2] == pytest.approx((60.0, 120.0), abs=1)
    assert picture.says == "b 4 min 00 s, run1 2 attempts, run2 hung, rank 1"
    assert shown.caption == "4 min 00 s in 1 phases; thin bars: launches."


def test_a_phase_begins_where_the_one_before_it_ended() -> None:
    later = phase("b", 0, 600.0).model_copy(update={"started_at": "2026-11-22T01:00:00Z"})
    shown, picture = course(two(phase("a", 0, 600.0), later))
    spans = [span[:2] for span in bars(picture, "bar-pass")]
    assert spans[0] == pytest.approx((0.0, 10.0), abs=0.1)
    assert spans[1] == pytest.approx((10.0, 20.0), abs=0.1)
    assert shown.caption.startswith("20 min 00 s in 2 phases")
