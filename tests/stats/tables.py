"""Tables of arms and rounds for the tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from runbook.stats.arms import judge_rounds, rounds_of
from runbook.stats.decision import Decision

__all__ = ["best_arm", "table_of"]


def table_of(values: npt.NDArray[np.float64], arms: Sequence[str] | None = None) -> pd.DataFrame:
    """An array [rounds, arms] as a long table with columns arm, block, value."""
    names = arms or [f"arm{index}" for index in range(values.shape[1])]
    rows = [
        (name, block, values[block, index])
        for block in range(values.shape[0])
        for index, name in enumerate(names)
    ]
    return pd.DataFrame(rows, columns=["arm", "block", "value"])


def best_arm(table: pd.DataFrame) -> Decision:
    """The best arm of a long table, at an error of 1 %."""
    return judge_rounds(*rounds_of(table), error=0.01)
