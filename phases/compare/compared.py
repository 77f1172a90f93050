"""The values behind decisions, for the pictures of what decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phases.kit.measure import derived
from runbook.records import Compared, Comparison, Mark, Measurement
from runbook.stats.decision import Decision

if TYPE_CHECKING:
    import pandas as pd


def compared_arms(
    frame: pd.DataFrame,
    decision: Decision,
    measured: Measurement,
    *,
    arms: tuple[str, str],
    said: Callable[[str], str],
) -> list[Compared]:
    """Ratios of throughput round by round: the deciding pair `arms`, then its leader's others.

    `measured` is the estimate of the deciding pair. Only the rounds that the decision rests on
    count.
    """
    table = frame.pivot(index="block", columns="arm", values="value").iloc[: decision.n]

    def row(above: str, below: str, measurement: Measurement, *, decides: bool) -> Compared:
        return Compared(
            label=f"{said(above)} against {said(below)}",
            values=tuple(float(ratio) for ratio in table[above] / table[below]),
            measurement=measurement,
            decides=decides,
        )

    rows = [row(*arms, measured, decides=True)]
    for other, bounds in _others(decision, arms[1]):
        ratio, low, high = bounds
        against = derived(
            measured,
            name=f"{measured.name}[{other}]",
            value=ratio,
            unit=measured.unit,
            interval=(low, high),
        )
        # The leader has to beat each of them, so each decides; the closest is named first.
        rows.append(row(arms[0], other, against, decides=True))
    return rows


def efficiency_row(
    same: str,
    together: Sequence[Measurement],
    alone: Sequence[Measurement],
    measured: Measurement,
    *,
    ranks: int,
    decides: bool,
) -> Compared:
    """E = T_N / (N x T_1) of every pair of launches."""
    values = [
        float(many.value) / (ranks * float(one.value))
        for many, one in zip(together, alone, strict=True)
    ]
    return Compared(label=same, values=tuple(values), measurement=measured, decides=decides)


def efficiencies_compared(
    rows: Sequence[Compared],
    *,
    check: str,
    floor: Sequence[Mark],
    title: str = "Scaling efficiency E, pair by pair",
    each: str = "one pair of launches",
) -> Comparison:
    """Scaling efficiencies against the linear one and the floor that decides, if one does."""
    return Comparison(
        check=check,
        title=title,
        each=each,
        unit="E",
        rows=tuple(rows),
        reference=Mark(label="linear", value=1.0),
        limits=tuple(floor),
    )


def _others(decision: Decision, closest: str) -> list[tuple[str, Sequence[float]]]:
    """Ratio and interval of the leader against each arm but the closest."""
    against = decision.details.get("against")
    if not isinstance(against, dict):
        return []
    return [
        (arm, [float(str(number)) for number in bounds])
        for arm, bounds in against.items()
        if arm != closest and isinstance(bounds, list)
    ]
