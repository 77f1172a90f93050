"""training.csv, in the form that the trainer writes today and in the older headerless form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from nsa import contract
from runbook.read.documents import name_below
from runbook.read.rows import RowSpec, read_rows
from runbook.records.evidence import TrainingLog

TRAINING_COLUMNS = contract.names(contract.TRAINING_COLUMNS)
LEGACY_COLUMNS = TRAINING_COLUMNS[:4]


def _spec(columns: tuple[contract.Column, ...], *, headerless: tuple[str, ...] = ()) -> RowSpec:
    return RowSpec(
        columns=contract.names(columns),
        key=columns[0].name,
        text=frozenset(column.name for column in columns if column.kind is str),
        filled=frozenset(column.name for column in columns if column.filled),
        whole=frozenset(column.name for column in columns if column.kind is int),
        headerless=headerless,
    )


TRAINING = _spec(contract.TRAINING_COLUMNS, headerless=LEGACY_COLUMNS)
GATES = _spec(contract.GATES_COLUMNS)


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
        path=name_below(path, relative_to),
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
