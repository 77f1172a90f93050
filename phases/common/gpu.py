"""Rows from the samples of nvidia-smi that are taken while a launch runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phases.common.case import Case
from phases.common.finding import Finding, Unanswerable, incomplete, skipped
from phases.common.measure import against, in_file
from phases.common.training import first_problem
from phases.limits import GPU_IMBALANCE, GPU_UTILISATION, MEMORY_HEADROOM
from runbook.records import Measurement, Reason
from runbook.records.evidence import LaunchEvidence

if TYPE_CHECKING:
    import pandas as pd


def utilisation(case: Case, names: Sequence[str]) -> Finding:
    """Mean utilization of the least busy GPU over the later half of each launch."""
    return _needs_gpu(case) or first_problem(_utilisation, case, names)


def balance(case: Case, names: Sequence[str]) -> Finding:
    """Difference of mean utilization between the busiest and the least busy GPU."""
    return _needs_gpu(case) or first_problem(_balance, case, names)


def headroom(case: Case, names: Sequence[str]) -> Finding:
    """Share of memory that was free on the fullest GPU at its fullest moment."""
    return _needs_gpu(case) or first_problem(_headroom, case, names)


def _needs_gpu(case: Case) -> Finding | None:
    if case.profile.has_gpu:
        return None
    return skipped(Reason.NEEDS_CUDA, f"profile {case.profile.name} has no GPU")


def _samples(case: Case, name: str) -> tuple[LaunchEvidence, pd.DataFrame]:
    launch = case.completed(name)
    frame = launch.gpu_samples
    if frame is None or frame.empty:
        reason = f"{name}: no samples of nvidia-smi were taken"
        raise Unanswerable(incomplete(Reason.MISSING_ARTIFACT, reason))
    if frame["index"].nunique() < launch.launch.nproc:
        seen = frame["index"].nunique()
        reason = f"{name}: samples of {seen} GPU(s) for {launch.launch.nproc} ranks"
        raise Unanswerable(
            incomplete(Reason.MISSING_ARTIFACT, reason, evidence=(launch.gpu_samples_path,))
        )
    return launch, frame


def _means(frame: pd.DataFrame) -> dict[int, float]:
    """Mean utilization per GPU over the later half of the samples: start-up is not training."""
    means = {}
    for index, rows in frame.groupby("index"):
        later = rows["utilization_percent"].to_numpy(dtype=float)[len(rows) // 2 :]
        means[int(str(index))] = float(later.mean())
    return means


def _value(
    launch: LaunchEvidence, frame: pd.DataFrame, name: str, value: float, unit: str
) -> Measurement:
    path, sha256 = launch.gpu_samples_path, launch.gpu_samples_sha256
    return in_file(path, sha256, name, value, unit, n=len(frame))


def _utilisation(case: Case, name: str) -> Finding:
    launch, frame = _samples(case, name)
    means = _means(frame)
    least = min(means, key=lambda index: means[index])
    value = _value(launch, frame, "gpu_utilisation", means[least], "%")
    text = f"{name}: least busy is GPU {least} with {means[least]:.0f} %"
    return against(value, case.limit(GPU_UTILISATION), text)


def _balance(case: Case, name: str) -> Finding:
    launch, frame = _samples(case, name)
    means = _means(frame)
    if len(means) < 2:
        return skipped(Reason.NEEDS_GPUS, "balance needs at least two GPUs")
    spread = max(means.values()) - min(means.values())
    value = _value(launch, frame, "gpu_imbalance", spread, "percentage points")
    each = ", ".join(f"GPU {index} {mean:.0f} %" for index, mean in means.items())
    return against(value, case.limit(GPU_IMBALANCE), each)


def _headroom(case: Case, name: str) -> Finding:
    launch, frame = _samples(case, name)
    used = frame["memory_used_mib"].to_numpy(dtype=float)
    total = frame["memory_total_mib"].to_numpy(dtype=float)
    fullest = int((used / total).argmax())
    free = 100.0 * (1.0 - used[fullest] / total[fullest])
    value = _value(launch, frame, "memory_headroom", float(free), "%")
    text = f"{name}: {used[fullest]:.0f} of {total[fullest]:.0f} MiB at most, {free:.0f} % free"
    return against(value, case.limit(MEMORY_HEADROOM), text)
