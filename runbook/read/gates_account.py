"""The account of the gates: what gates.csv shows, against the gates of steps computed twice.

Like `runbook.read.accounts`: every function returns what does not balance, in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from runbook.read.accounts import Workload
from runbook.records.evidence import RankLog

if TYPE_CHECKING:
    import pandas as pd

# So many readings of the gates that do not differ in any digit were not taken.
_STUCK = 3
# Means of the same gates by two formulas in float64; a device may round the pass otherwise.
GATES_TOLERANCE = 1e-4


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# So many numbers are told of a layer; of which a column is, and what it makes of the layers.
_TOLD = 5
_OVER_LAYERS: Mapping[str, tuple[int, Callable[[Sequence[float]], float]]] = {
    "entropy": (0, min),
    "max_gate": (1, max),
    "entropy_mean": (0, _mean),
    "max_gate_mean": (1, _mean),
    "share_cmp": (2, _mean),
    "share_sel": (3, _mean),
    "share_win": (4, _mean),
}


def gates_account(
    gates: pd.DataFrame | None, ranks: Sequence[RankLog], work: Workload
) -> list[str]:
    """Readings differ, because parameters move, and are those of the steps computed twice."""
    if gates is None or gates.empty:
        return []
    problems = []
    told = [gates[name] for name in ("entropy", "max_gate") if name in gates]
    if len(gates) >= _STUCK and all(column.nunique() == 1 for column in told):
        problems.append(f"{len(gates)} readings of the gates are equal in every digit")
    return problems + list(_again_problems(gates, ranks, work))


def _again_problems(gates: pd.DataFrame, ranks: Sequence[RankLog], work: Workload) -> Iterator[str]:
    """Readings of rank 0 that are not those of its step when it is computed a second time."""
    again = next((r.ending.get("recomputed") or {} for r in ranks if r.rank == 0), {})
    steps, layers = again.get("steps") or (), again.get("gates") or ()
    if not steps or len(steps) != len(layers):
        yield "the gates of no step were computed a second time"
        return
    by_step = dict(zip(steps, layers, strict=True))
    both = gates[gates["step"].isin(by_step)]
    if both.empty:
        yield "no reading of the gates is of a step that was computed a second time"
    for row in both.to_dict("records"):
        found = by_step[int(row["step"])]
        if work.layers not in (None, len(found)) or any(len(o) != _TOLD for o in found):
            yield f"step {row['step']:.0f} tells the gates of {len(found)} layers"
            continue
        for name, (place, over) in _OVER_LAYERS.items():
            wanted, read = over([layer[place] for layer in found]), row.get(name, math.nan)
            # Shares are empty where auxiliary statistics are switched off.
            empty = name.startswith("share_") and math.isnan(read)
            if not empty and not abs(read - wanted) <= GATES_TOLERANCE:
                yield (
                    f"{name} of the gates in step {row['step']:.0f} is {read:.5f} in gates.csv, "
                    f"computed again {wanted:.5f}"
                )
