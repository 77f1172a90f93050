"""training.csv, in the form that the trainer writes today and in the older headerless form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from runbook.read.rows import RowSpec, read_rows
from runbook.records.evidence import TrainingLog

TRAINING_COLUMNS = (
    "step",
    "loss",
    "lr",
    "toks_per_s",
    "tokens",
    "dt_s",
    "grad_norm",
    "mem_mib",
    "arm",
    "block",
    "warmup",
    "fetch_s",
    "host_s",
)
LEGACY_COLUMNS = TRAINING_COLUMNS[:4]

TRAINING = RowSpec(
    columns=TRAINING_COLUMNS,
    key="step",
    text=frozenset({"arm"}),
    # A loss may be NaN, which the trainer writes as text; it may not be empty.
    filled=frozenset({"step", "loss", "toks_per_s", "tokens", "dt_s", "block", "warmup"}),
    whole=frozenset({"step", "block"}),
    headerless=LEGACY_COLUMNS,
)

GATES = RowSpec(
    columns=(
        "step",
        "entropy",
        "max_gate",
        "share_cmp",
        "share_sel",
        "share_win",
        "sel_blocks_mean",
        "sel_forced_share",
    ),
    key="step",
    filled=frozenset({"step"}),
    whole=frozenset({"step"}),
)


def read_training_csv(path: Path, *, relative_to: Path) -> TrainingLog:
    """Read a training.csv; `path` in the result is relative to `relative_to` where it lies below.

    Only complete rows are in the frame. A torn last line is dropped and counted, and is no
    damage; anything wrong before it is (`damaged`): unreadable rows, a second header, steps that
    go back or repeat (several runs or two writers in one file). Raises `OSError` if the file
    cannot be read at all.
    """
    rows = read_rows(path, TRAINING)
    frame, problems, damaged = rows.frame, rows.problems, rows.damaged
    if "warmup" in frame:
        frame["warmup"] = frame["warmup"] != 0
    back = _steps_back(frame)
    if back:
        damaged = True
        problems.append(
            f"steps do not increase at {back} places: several runs or two writers in one file"
        )
    if rows.legacy:
        problems.append("the file has no header; read as step,loss,lr,toks_per_s")
    missing = [name for name in TRAINING_COLUMNS if name not in frame] if not rows.legacy else []
    if missing:
        problems.append(f"the header lacks: {', '.join(missing)}")
    return TrainingLog(
        frame=frame,
        path=_name(path, relative_to),
        sha256=rows.sha256,
        legacy=rows.legacy,
        dropped_rows=rows.dropped,
        problems=tuple(problems),
        damaged=damaged,
    )


def _steps_back(frame: pd.DataFrame) -> int:
    if "step" not in frame or len(frame) < 2:
        return 0
    return int(np.count_nonzero(np.diff(frame["step"].to_numpy()) <= 0))


def _name(path: Path, relative_to: Path) -> str:
    if path.is_relative_to(relative_to):
        return path.relative_to(relative_to).as_posix()
    return path.as_posix()
