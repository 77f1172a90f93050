"""Memory that is read from outside, of a process that tells nothing: leak or allocator?

glibc returns little of what is freed, so that the resident memory of a healthy process rises until
its free list is long enough: measured for 600 to 4,000 steps, evenly at times, to 1.75 times what
it had at first, while the bytes in use stay level. A leak looks the same for as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from runbook.stats.decision import Decided, Decision, FloatArray
from runbook.stats.steady import levels, memory_plateau

# What rises to this many times its first level, and in the last quarter still by this share of its
# pace so far, is no allocator's: its rise stays below the first and slows down before it ends.
LEAK_FACTOR, LEAK_PACE = 2.0, 0.5
# A last quarter with no more than this share of all growth is level; an even rise has a quarter.
LEVEL_SHARE = 0.1


def outside_plateau(
    steps: Sequence[float] | FloatArray,
    mib: Sequence[float] | FloatArray,
    project_to_step: float,
    limit: float,
) -> Decision:
    """Has the resident memory of a trainer's processes reached its plateau?

    Args and Raises as of `memory_plateau`, whose word stands unless it is FAIL for growth alone.

    Returns:
        FAIL if the limit is already passed, or if memory came to twice its first level (the median
        of the first twentieth of the rows) and rose in the last quarter at half its pace so far
        or more. Of other growth PASS if the last quarter, by its highest twentieth, has at most a
        tenth of it and the projection's upper bound stays within the limit. Else INCONCLUSIVE.
    """
    found = memory_plateau(steps, mib, project_to_step, limit)
    used = np.asarray(mib, dtype=np.float64)
    if found.outcome is not Decided.FAIL or float(used.max()) > limit:
        return found
    at = np.asarray(steps, dtype=np.float64)
    held = levels(used)
    quarter, first, now = len(held) // 4, held[0], held[-1]
    late = max(held[-quarter:]) - max(held[:-quarter])
    grown = max(held) - first
    rate = (now - held[-quarter - 1]) * (at[-1] - at[0]) / (at[-1] - at[-(at.size // 4)])
    high = found.interval[1] if found.interval else limit
    says = f"{first:.0f} MiB at first, {now:.0f} at the end"
    if now >= LEAK_FACTOR * first and rate >= LEAK_PACE * grown:
        return replace(found, reason=f"{says}; {found.reason}")
    if late <= LEVEL_SHARE * grown and high <= limit:
        level = f"{says}, level in the last quarter; up to {high:.0f} MiB by step"
        reason = f"{level} {project_to_step:g}, limit {limit:.0f} MiB"
        return replace(found, outcome=Decided.PASS, reason=reason)
    slope, goal = found.details["slope_mib_per_step"], f"by step {project_to_step:g}"
    pace = f"{slope:+.3g} MiB/step, {found.estimate:.0f} MiB {goal}, limit {limit:.0f} MiB"
    reason = f"{says}; {pace}: a leak looks so, and an allocator that still fills its free list"
    return replace(found, outcome=Decided.INCONCLUSIVE, reason=reason)
