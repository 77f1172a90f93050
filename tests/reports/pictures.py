"""Records of one phase with pictures."""

from __future__ import annotations

from collections.abc import Sequence

from runbook.records import Outcome, RunRecord, Series, Verdict
from tests.factory.records import phase
from tests.reports.samples import digest, run


def series(ys: Sequence[float], *, name: str = "run", **told: object) -> Series:
    points = tuple((float(step), y) for step, y in enumerate(ys, start=1))
    usual = {"name": name, "label": name, "unit": "tok/s", "points": points, "n": len(ys)}
    usual |= {"path": "phase/run/training.csv", "sha256": digest("p")}
    return Series.model_validate({**usual, **told})


def record(*, curves: Sequence[Series] = (), **told: object) -> RunRecord:
    """A run of one phase `sweep` with these pictures."""
    made = phase("sweep", **{"outcome": Outcome.PASS, "series": curves, **told})
    return run(Verdict.GO, (made,))
