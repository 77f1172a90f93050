"""From a long table (arm, block, value) to an array [rounds, arms]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from runbook.decide._inputs import FloatArray
from runbook.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COLUMNS", "complete_rounds", "rounds_of"]

COLUMNS = ("arm", "block", "value")


def rounds_of(samples: pd.DataFrame) -> tuple[list[str], FloatArray]:
    """Arm names in order of appearance and their values [rounds, arms], rounds in order.

    Numbered rounds are sorted by number, others stay in order of appearance.

    Raises:
        UsageError: names every problem found.
    """
    _check_columns(samples)
    problems = _value_problems(samples)
    arms = [str(arm) for arm in samples["arm"].drop_duplicates()]
    if len(arms) < 2:
        problems.append(f"arms: {arms}; at least two are needed to compare")
    counts = samples.groupby(["block", "arm"], sort=False).size().unstack(fill_value=0)
    for block, row in counts.iterrows():
        missing = [str(arm) for arm, count in row.items() if count == 0]
        twice = [str(arm) for arm, count in row.items() if count > 1]
        if missing:
            problems.append(f"block {block}: no value of arm(s) {', '.join(missing)}")
        if twice:
            problems.append(f"block {block}: more than one value of arm(s) {', '.join(twice)}")
    if problems:
        raise UsageError(
            problems, hint="every arm must run exactly once per block (see complete_rounds)"
        )
    table = samples.pivot(index="block", columns="arm", values="value")
    if not _is_number(samples):
        table = table.reindex(samples["block"].drop_duplicates())
    table = table[samples["arm"].drop_duplicates().tolist()]
    return arms, table.to_numpy(dtype=np.float64)


def complete_rounds(samples: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The rows of rounds in which every arm has one value, and how many rounds were left out.

    For a run that was stopped in the middle of a round.

    Raises:
        UsageError: a column is missing.
    """
    _check_columns(samples)
    arms = samples["arm"].nunique()
    per_block = samples.groupby("block")["arm"].agg(["nunique", "size"])
    whole = per_block.index[(per_block["nunique"] == arms) & (per_block["size"] == arms)]
    return samples[samples["block"].isin(whole)], int(len(per_block) - len(whole))


def _check_columns(samples: pd.DataFrame) -> None:
    missing = [column for column in COLUMNS if column not in samples.columns]
    if missing:
        raise UsageError(
            f"missing column(s) {', '.join(missing)}; got {', '.join(map(str, samples.columns))}",
            hint=f"needed: {', '.join(COLUMNS)}",
        )
    if samples.empty:
        raise UsageError("the table has no rows", hint=f"needed: {', '.join(COLUMNS)}")


def _value_problems(samples: pd.DataFrame) -> list[str]:
    import pandas as pd

    problems = [
        f"column {column}: {int(gaps)} empty cell(s)"
        for column in ("arm", "block")
        if (gaps := samples[column].isna().sum())
    ]
    numbers = pd.to_numeric(samples["value"], errors="coerce").to_numpy(dtype=np.float64)
    bad = ~(np.isfinite(numbers) & (numbers > 0))
    if bad.any():
        first = samples.iloc[int(np.flatnonzero(bad)[0])]
        problems.append(
            f"column value: {int(bad.sum())} value(s) not finite and above 0,"
            f" first {first['value']!r} (arm {first['arm']}, block {first['block']})"
        )
    return problems


def _is_number(samples: pd.DataFrame) -> bool:
    return bool(np.issubdtype(samples["block"].to_numpy().dtype, np.number))
