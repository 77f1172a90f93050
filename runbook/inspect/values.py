"""Values that cannot be: not finite, against the clock, below what the data allows."""

from __future__ import annotations

import numpy as np
import pandas as pd

from runbook.evidence import TrainingLog
from runbook.inspect.types import Code, Finding

__all__ = ["floor_findings", "value_findings"]

_SMOOTH = 5
_FLOOR_SLACK = 0.05
_RATE_SLACK = 0.02


def value_findings(log: TrainingLog) -> list[Finding]:
    frame = log.frame
    findings = []
    for name in ("loss", "toks_per_s"):
        if name not in frame:
            continue
        bad = frame[~np.isfinite(frame[name].to_numpy(dtype=np.float64))]
        if len(bad):
            text = (
                f"{name} is not finite in {len(bad)} rows, first at step {int(bad['step'].iloc[0])}"
            )
            findings.append(Finding(code=Code.NON_FINITE, message=text, path=log.path))
    for name in ("dt_s", "toks_per_s"):
        if name in frame and bool((frame[name] <= 0).any()):
            text = f"{name} is not above zero in {int((frame[name] <= 0).sum())} rows"
            findings.append(Finding(code=Code.CLOCK_BACK, message=text, path=log.path))
    if {"tokens", "dt_s", "toks_per_s"} <= set(frame) and len(frame):
        stated, implied = frame["toks_per_s"], frame["tokens"] / frame["dt_s"]
        wrong = frame[((stated - implied).abs() > _RATE_SLACK * implied.abs())]
        if len(wrong):
            text = (
                f"toks_per_s is not tokens / dt_s in {len(wrong)} rows, "
                f"first at step {int(wrong['step'].iloc[0])}"
            )
            findings.append(Finding(code=Code.RATE_DOES_NOT_FOLLOW, message=text, path=log.path))
    return findings


def floor_findings(
    log: TrainingLog, parts: list[pd.DataFrame], floor: float | None, source: str
) -> list[Finding]:
    """A mean over a few rows below the floor: a single row may dip below it by chance."""
    if floor is None or "loss" not in log.frame:
        return []
    lowest, step = float("inf"), 0
    for part in parts:
        smooth = part["loss"].rolling(min(_SMOOTH, len(part))).mean().to_numpy(dtype=np.float64)
        if bool(np.isnan(smooth).all()):
            continue
        where = int(np.nanargmin(smooth))
        if smooth[where] < lowest:
            lowest, step = float(smooth[where]), int(part["step"].iloc[where])
    if not lowest < floor - _FLOOR_SLACK:
        return []
    text = (
        f"the loss reaches {lowest:.3f} at step {step}, below {floor:.3f} ({source}): "
        "the model sees what it should predict, or the data is not what it is said to be"
    )
    return [Finding(code=Code.BELOW_FLOOR, message=text, path=log.path)]
