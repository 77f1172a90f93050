"""Does a launch keep what it takes: memory under its limit, descriptors, threads, files?

By the ranks' own word, and as the kernel shows their processes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from phases.kit.case import Case
from phases.kit.finding import Finding, failed, missing, whole
from phases.kit.measure import against, decided, estimated, file_value, rank_value
from runbook.folder import RESOURCES_CSV
from runbook.records import Measurement, Outcome, Reason
from runbook.records.evidence import Column, Frame, LaunchEvidence, RankLog
from runbook.records.measurement import MIB_PER_GIB
from runbook.stats import Decision, FloatArray
from runbook.stats.series import memory_plateau as projected

# Where the limit is only shown the projection has none; the leak is still looked for.
_UNLIMITED_MIB = 1e12
# Looks at a launch that steps, without which nothing is said of a trend.
FEWEST_LOOKS = 8
# A rank may open or start so many more for good between the third and the last quarter: a
# communicator, a worker, a file of a profile.
FEW = 4.0
# MiB that may be new in /dev/shm, and MiB of logs that a rank may write in a step: ours take 0.003.
SHM_SLACK_MIB = 64.0
LOGS_MIB = 0.0625
_IN_FILES = ("shm_mib", "folder_mib")
# A rank tells its memory at the end of a step, and a look meets it anywhere: from so many looks on,
# all of the last quarter beyond all of the second are no accident, by MiB that two readings may
# differ. Where looks of the last half differ by less than a tenth, what they typically show is what
# is told, within this share and within what they differ by: 0.00 MiB in 8 healthy ranks. As many
# looks tell a trend of what each quarter holds at least: none of 134 ranks without a leak had one.
TOLD_LOOKS, TOLD_MIB = 20, 16.0
LEVEL_SPREAD, LEVEL_SHARE = 0.1, 0.02
_COUNTED = {"descriptors": "open file descriptors", "threads": "threads", "children": "children"}


def with_memory(case: Case, name: str) -> LaunchEvidence:
    """The launch, if each of its ranks told its memory."""
    launch = case.completed(name)
    known = [rank.rank for rank in launch.ranks if not _readings(rank).empty]
    if known != list(range(launch.launch.nproc)):
        raise missing(f"memory of {len(known)} of {launch.launch.nproc} ranks is known")
    return launch


def _readings(rank: RankLog) -> Frame:
    """Steps after which the rank told its memory."""
    import pandas as pd

    return pd.DataFrame() if rank.steps is None else rank.steps[rank.steps["mem_mib"].notna()]


def memory_plateau(case: Case, name: str) -> Finding:
    """Of the rank whose memory looks worst; nothing else that they hold may grow either.

    Among those with the same outcome it is the one that may need most.
    """
    ranks = with_memory(case, name).ranks
    every = {rank.rank: plateau_of(case, rank) for rank in ranks}

    def worst(found: Finding) -> tuple[int, float]:
        """By the upper bound of the projection; nothing is known of a rank with too few rows."""
        bounds = found.measurement.interval if found.measurement else None
        return found.outcome.rank, -(bounds[1] if bounds else 0.0)

    found = min(every.values(), key=worst)
    if found.outcome is Outcome.FAIL:
        return replace(found, clue=_what_grows(case, every))
    told = replace(found, reason=f"{found.reason}{resource_words(case, name)}")
    return resource_leak(case, name) or told


def _what_grows(case: Case, found: Mapping[int, Finding]) -> str:
    """Which memory it is, and on which ranks."""
    what = "tensors on the GPU" if case.profile.has_gpu else "the process (RSS)"
    growing = [rank for rank, one in found.items() if one.outcome is Outcome.FAIL]
    several = "s" if len(growing) > 1 else ""
    only = f"rank{several} {', '.join(map(str, growing))} only"
    return f"The memory of {what} grows on {'every rank' if len(growing) == len(found) else only}."


def plateau_of(case: Case, rank: RankLog) -> Finding:
    rows = _readings(rank).set_index("step")["mem_mib"]
    readings = rank_value(rank, "mem_mib", 0.0, "MiB")
    return projected_plateau(case, rows, readings, who=f"rank {rank.rank}")


def projected_plateau(
    case: Case,
    mib: Column,
    readings: Measurement,
    *,
    who: str,
    ranks: int = 1,
    decide: Callable[..., Decision] = projected,
) -> Finding:
    """Of readings by step, of `ranks` together, each of which has the profile's limit."""
    limit = case.limit("memory_gib")
    decision = decide(
        mib.index.to_numpy(dtype=float),
        np.asarray(mib, dtype=np.float64),
        float(case.profile.workload.production_steps),
        limit.value * MIB_PER_GIB * ranks if limit.gated else _UNLIMITED_MIB,
    )
    value = estimated(readings, decision, name="memory_projected", unit="MiB projected")
    finding = decided(decision, value)
    grows = finding.code is Reason.BELOW_LIMIT
    code, topic = (Reason.LEAK, "leak") if grows else (finding.code, "")
    title = _growth(decision, who, limit.value * ranks if limit.gated else None) if grows else ""
    return replace(finding, code=code, reason=f"{who}: {finding.reason}", topic=topic, title=title)


def _growth(decision: Decision, who: str, limit_gib: float | None) -> str:
    """The growth in one sentence; empty where a rank is over its limit without growing."""
    slope, end = decision.details["slope_mib_per_step"], decision.estimate
    if not isinstance(slope, float) or slope <= 0 or end is None:
        return ""
    bound = f" (limit {limit_gib:g} GiB)" if limit_gib else ""
    return (
        f"Memory of {who} grows by {slope:.2g} MiB per step: {end / MIB_PER_GIB:.3g} GiB by the "
        f"end of production{bound}."
    )


def memory_limit(case: Case, name: str) -> Finding:
    """On CUDA the most that the allocator ever held; on a CPU the resident memory."""
    launch = with_memory(case, name)
    peaks = {rank.rank: _peak_mib(case, rank) for rank in launch.ranks}
    rank = max(launch.ranks, key=lambda log: peaks[log.rank])
    peak = peaks[rank.rank]
    value = rank_value(rank, "peak_memory", peak / MIB_PER_GIB, "GiB")
    tensors = float(_readings(rank)["mem_mib"].max())
    held = f" held by the allocator at most, {tensors:.0f} MiB of it by tensors"
    text = f"rank {rank.rank} uses most: {peak:.0f} MiB{held if case.profile.has_gpu else ''}"
    return against(value, case.limit("memory_gib"), text)


def _peak_mib(case: Case, rank: RankLog) -> float:
    rows = _readings(rank)
    if not case.profile.has_gpu:
        return float(rows["mem_mib"].max())
    held = rows["reserved_mib"].max() if "reserved_mib" in rows else math.nan
    if not held >= 0:
        raise missing(f"rank {rank.rank} does not say what its allocator held", rank.path)
    return max(float(held), float(rows["mem_mib"].max()))


# -- what is held besides --------------------------------------------------------------------------


class _Growth(NamedTuple):
    """What is held ever more, by how much, and in words."""

    what: str
    more: float
    says: str


def resource_leak(case: Case, name: str) -> Finding | None:
    """FAIL if a rank, or all together, hold ever more in the second half of the launch.

    INVALID where the looks at its processes cannot be read.

    None if they do not, or if too few looks are known: `resource_words` says which.
    """
    launch = case.launch(name)
    looks = _looks(launch)
    whole(launch, f"/{RESOURCES_CSV}: ", "resources")
    if looks is None:
        return None
    steps_left = case.profile.workload.production_steps - float(looks["step"].max())
    problems = [
        *_not_told(looks, launch),
        *_by_rank(looks),
        *_in_files(looks, launch.launch.nproc, steps_left),
    ]
    if not problems:
        return None
    first = problems[0]
    reason = "; ".join(one.says for one in problems)
    unit, grown = "MiB" if first.what.endswith("_mib") else first.what, f"{first.what}_growth"
    value = file_value(launch, "resources", grown, first.more, unit, n=len(looks))
    # Memory that is not told may be a leak too; which of both lies is the first question.
    if first.what == "rss_mib":
        return failed(Reason.UNBALANCED, reason, measurement=value, topic="accounts")
    return failed(Reason.LEAK, reason, measurement=value, topic="held")


def resource_words(case: Case, name: str) -> str:
    """What is known of a launch without such a leak, to be told after its memory."""
    if _looks(case.launch(name)) is None:
        return "; descriptors, threads, children and files: too few looks at its processes"
    return "; descriptors, threads, children and files keep level, memory as the kernel shows it"


def _looks(launch: LaunchEvidence) -> Frame | None:
    """Looks at ranks that step; None if there are too few of any rank."""
    if launch.resources is None or launch.resources.empty:
        return None
    stepping = launch.resources[launch.resources["step"] > 0]
    counts = stepping.groupby("rank").size()
    return stepping if len(counts) and counts.min() >= FEWEST_LOOKS else None


def _not_told(looks: Frame, launch: LaunchEvidence) -> Iterator[_Growth]:
    """Resident memory that the kernel shows and the rank's heartbeats do not."""
    for log in launch.ranks:
        own = looks[looks["rank"] == log.rank]
        if log.steps is None or len(own) < TOLD_LOOKS:
            continue
        told = log.steps.drop_duplicates("step").set_index("step")["rss_mib"].sort_index()
        seen = own["rss_mib"].to_numpy(dtype=float)
        gap = seen - told.reindex(own["step"], method="nearest").to_numpy(dtype=float)
        quarter = len(gap) // 4
        grown = float(gap[-quarter:].min() - gap[quarter : 2 * quarter].max())
        if grown > TOLD_MIB:
            text = f"{grown:.0f} MiB at least in the last half, allowed {TOLD_MIB:.0f} MiB"
            what = "holds ever more memory that its heartbeats do not tell"
            yield _Growth("rss_mib", grown, f"rank {log.rank} {what}: {text}")
        elif off := _off_level(seen, gap):
            text = f"tells {abs(off):.0f} MiB {'less' if off > 0 else 'more'}"
            shown = f"the {seen[-quarter:].mean():.0f} MiB that the kernel shows"
            yield _Growth("rss_mib", off, f"rank {log.rank} {text} than {shown}")


def _off_level(seen: FloatArray, gap: FloatArray) -> float:
    """MiB seen beyond those told, where what is seen keeps level; 0 if they may differ."""
    half = len(seen) // 2
    low, level, high = (float(at) for at in np.percentile(seen[half:], (10, 50, 90)))
    spread, off = high - low, float(np.median(gap[half:]))
    allowed = max(TOLD_MIB, LEVEL_SHARE * level) + spread
    return off if spread < LEVEL_SPREAD * level and abs(off) > allowed else 0.0


def _by_rank(looks: Frame) -> Iterator[_Growth]:
    for rank, own in looks.groupby("rank"):
        for column, words in _COUNTED.items():
            held = own[column].to_numpy(dtype=float)
            before, after = _late_levels(held)
            if after - before - _once(held) > FEW:
                text = f"{before:.0f} in the third quarter, {after:.0f} in the last"
                says = f"rank {rank} holds ever more {words}: {text}, allowed {FEW:.0f} more"
                yield _Growth(column, after - before, says)
            elif len(held) >= TOLD_LOOKS and _rises(least := _least(held)):
                quarters = ", ".join(f"{one:.0f}" for one in least)
                says = f"rank {rank} holds ever more {words}: at least {quarters} in its quarters"
                yield _Growth(column, least[-1] - least[0], says)


def _in_files(looks: Frame, ranks: int, steps_left: float) -> Iterator[_Growth]:
    """Of all ranks together: /dev/shm keeps its level, and the folder grows as logs do."""
    both = looks.drop_duplicates("mono")
    half = both.iloc[len(both) // 2 :]
    steps = max(1.0, float(half["step"].iloc[-1] - half["step"].iloc[0]))
    shm, folder = (float(half[name].iloc[-1] - half[name].iloc[0]) for name in _IN_FILES)
    if shm > SHM_SLACK_MIB:
        text = f"({shm:.0f} MiB in the last half, allowed {SHM_SLACK_MIB:.0f} MiB)"
        says = f"files in /dev/shm grow by {shm / steps:.3g} MiB in each step {text}"
        yield _Growth("shm_mib", shm, says)
    allowed, free = LOGS_MIB * ranks, float(half["free_mib"].iloc[-1])
    rate = folder / steps
    needed = rate * max(0.0, steps_left)
    if folder > 1.0 and (rate > allowed or needed > free):
        grows = f"the launch's folder grows by {rate:.3g} MiB in each step without its checkpoints"
        says = f"{grows} (allowed {allowed:.3g} MiB): {needed:.0f} MiB more to the last step of "
        yield _Growth("folder_mib", folder, f"{says}production, {free:.0f} MiB are free")


def _late_levels(held: FloatArray) -> tuple[float, float]:
    """The median level in the third quarter and in the last."""
    half, last = len(held) // 2, len(held) * 3 // 4
    return float(np.median(held[half:last])), float(np.median(held[last:]))


def _least(held: FloatArray) -> list[float]:
    """The least of each quarter: what is opened and closed again does not count."""
    return [float(quarter.min()) for quarter in np.array_split(held, 4)]


def _rises(levels: Sequence[float]) -> bool:
    """Few more each time, but each time: one thread for an evaluation is a leak too."""
    return all(map(operator.lt, levels, levels[1:]))


def _once(held: FloatArray) -> float:
    """What was new from one look to the next, once: a first save opens a communicator's files.

    0 if it came again, at least half of it: then it is a trend.
    """
    second, largest = (float(more) for more in np.sort(np.diff(held))[-2:])
    return largest if largest > 0 and second <= largest / 2 else 0.0
