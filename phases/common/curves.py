"""Curves for the report's plots; nothing is judged from them."""

from __future__ import annotations

from collections.abc import Mapping

from phases.common.case import Case
from phases.common.tables import optional
from runbook.records import Series, thin_points

__all__ = ["columns", "gate_entropy"]

_UNITS = {"toks_per_s": "toks/s", "loss": "nats", "mem_mib": "MiB"}


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
