"""What a phase shows is recomputed like its numbers: an edited picture is a difference."""

from __future__ import annotations

import pytest

from runbook.engine.verify import compare_phases
from runbook.records import Compared, Mark, PhaseRecord
from tests.reports.pictures import comparison, estimate, record, series


def phase(*, value: float = 1.0, interval: tuple[float, float] = (0.9, 1.1), level: float = 2.0,
          point: float = 3.0) -> PhaseRecord:  # fmt: skip
    row = Compared(label="a", values=(value,), measurement=estimate(1.0, interval))
    curve = series([1.0, point], limits=[Mark(label="limit", value=level)])
    (made,) = record(curves=[curve], comparisons=[comparison([row])]).phases
    return made


@pytest.mark.parametrize(
    ("edited", "where"),
    [
        (phase(value=1.5), "sweep: comparison 'sweep.best'"),
        (phase(interval=(0.99, 1.01)), "sweep: comparison 'sweep.best'"),
        (phase(level=9.0), "sweep: series 'run'"),
        (phase(point=9.0), "sweep: series 'run'"),
    ],
)
def test_an_edited_picture_is_a_difference(edited: PhaseRecord, where: str) -> None:
    assert compare_phases(phase(), phase()) == []
    (problem,) = compare_phases(edited, phase())
    assert problem.startswith(where)


def test_a_comparison_that_was_left_out_is_a_difference() -> None:
    none = phase().model_copy(update={"comparisons": ()})
    assert compare_phases(none, phase())
    assert compare_phases(phase(), none)
