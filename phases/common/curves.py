"""Do two arms learn alike: the difference of their losses, round by round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phases.common.arms import places, source_log
from phases.common.case import Case
from phases.common.finding import Unanswerable, incomplete
from phases.common.measure import log_value
from phases.common.rates import optional
from runbook.records import Measurement, Reason, Series, thin_points
from runbook.records.measurement import TOKENS_PER_SECOND

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


_UNITS = {"toks_per_s": TOKENS_PER_SECOND, "loss": "nats", "mem_mib": "MiB"}


def columns(case: Case, launch: str, wanted: Mapping[str, float | None]) -> tuple[Series, ...]:
    """Columns of a training.csv over the steps, each with the limit to draw, if any."""
    log = optional(lambda: case.log(launch, whole=False))
    curves = []
    for name, limit in wanted.items():
        if log is None or name not in log.frame:
            continue
        rows = log.frame[log.frame[name].notna()]
        if rows.empty:
            continue
        curves.append(
            Series(
                name=f"{launch} {name}",
                unit=_UNITS[name],
                points=thin_points(rows["step"].tolist(), rows[name].tolist()),
                n=len(rows),
                limit=limit,
                path=log.path,
                sha256=log.sha256,
            )
        )
    return tuple(curves)


def gate_entropy(case: Case, launch: str, *, limit: float) -> tuple[Series, ...]:
    """Gate entropy over the steps, if it was recorded."""
    found = optional(lambda: case.launch(launch))
    if found is None or found.gates is None:
        return ()
    rows = found.gates[found.gates["entropy"].notna()]
    if rows.empty:
        return ()
    points = thin_points(rows["step"].tolist(), rows["entropy"].tolist())
    return (
        Series(
            name=f"{launch} gate entropy",
            unit="share",
            points=points,
            n=len(rows),
            limit=limit,
            path=found.gates_path,
            sha256=found.gates_sha256,
        ),
    )


_CONFIDENCE = 0.99


def loss_gap(case: Case, arms: Sequence[str]) -> Measurement:
    """Mean loss of the second arm minus that of the first, in nats, with a 99 % interval.

    One value per round and arm: the mean loss of the arm's measured steps in that round.
    """
    first, second = (_losses(case, arm) for arm in arms)
    rounds = min(len(first), len(second))
    if rounds == 0:
        raise Unanswerable(incomplete(Reason.TOO_FEW_SAMPLES, "no round has both arms"))
    if not (math.isfinite(first.sum()) and math.isfinite(second.sum())):
        raise Unanswerable(incomplete(Reason.NON_FINITE, "the loss is not finite in every step"))
    gaps = second[:rounds] - first[:rounds]
    mean = float(gaps.mean())
    interval = _interval(gaps) if rounds > 1 else (mean, mean)
    value = log_value(source_log(case, arms), "loss_gap", mean, "nats", n=rounds)
    return value.model_copy(update={"interval": interval})


def _losses(case: Case, arm: str) -> npt.NDArray[np.float64]:
    import numpy as np

    from runbook.stats import measured_rows

    means: list[float] = []
    for place in places(case, [arm]):
        rows = measured_rows(case.log(place.launch), arm=place.inside)
        if place.inside is None:
            means.append(float(rows["loss"].mean()))
        else:
            means.extend(float(value) for value in rows.groupby("block")["loss"].mean())
    return np.asarray(means, dtype=np.float64)


def _interval(gaps: npt.NDArray[np.float64]) -> tuple[float, float]:
    from scipy.stats import t

    mean, count = float(gaps.mean()), len(gaps)
    bar = float(gaps.std(ddof=1)) / math.sqrt(count)
    half = float(t.ppf((1 + _CONFIDENCE) / 2, count - 1)) * bar
    return mean - half, mean + half
