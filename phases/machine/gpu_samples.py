"""Rows from nvidia-smi's samples: only the GPUs that the ranks used, and only while they trained.

Starting a launch takes longer than the steps of a fast trainer, and the other cards of a machine
are nobody's business. Samples of all launches of a phase count together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from phases.kit.case import Case, Finding, inconclusive, missing, skipped
from phases.kit.limits import GPU_IMBALANCE, GPU_UTILISATION, MEMORY_HEADROOM
from phases.kit.measure import against, derived, effective_rate, file_value
from phases.machine.device_samples import FEWEST, sampled_at
from phases.machine.devices import require_gpu
from runbook.records import Measurement, Reason
from runbook.records.evidence import LaunchEvidence

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = ("timestamp", "index", "utilization_percent", "memory_used_mib", "memory_total_mib")
# nvidia-smi's manual: utilization is a mean over the past sixth of a second to one second.
_AVERAGED_S = 1.0
# Samples come five times a second: a sampler that is silent for longer, and for more than this
# share of the timed steps at their end, has ended before them.
_SILENT_S, _SILENT_SHARE = 2.0, 0.1


def utilisation(case: Case, names: Sequence[str]) -> Finding:
    """Mean utilization of the least busy GPU over the timed steps of all launches."""
    require_gpu(case, "has")
    means, value, few = _busy(case, names)
    if few:
        return inconclusive(Reason.TOO_FEW_SAMPLES, few, measurement=value)
    least = min(means, key=lambda index: means[index])
    text = f"least busy is GPU {least} with {means[least]:.0f} % in the timed steps"
    value = derived(value, name="gpu_utilisation", value=means[least], unit="%")
    return against(value, case.limit(GPU_UTILISATION), text)


def balance(case: Case, names: Sequence[str]) -> Finding:
    """Difference of mean utilization between the busiest and the least busy GPU."""
    require_gpu(case, "has")
    means, value, few = _busy(case, names)
    if len(means) < 2:
        return skipped(Reason.NEEDS_GPUS, "balance needs at least two GPUs")
    if few:
        return inconclusive(Reason.TOO_FEW_SAMPLES, few, measurement=value)
    spread = max(means.values()) - min(means.values())
    value = derived(value, name="gpu_imbalance", value=spread, unit="percentage points")
    each = ", ".join(f"GPU {index} {mean:.0f} %" for index, mean in means.items())
    return against(value, case.limit(GPU_IMBALANCE), each)


def headroom(case: Case, name: str) -> Finding:
    """Share of memory that was free on the fullest GPU at its fullest moment."""
    require_gpu(case, "has")
    launch, frame = _samples(case, name)
    used = frame["memory_used_mib"].to_numpy(dtype=float)
    total = frame["memory_total_mib"].to_numpy(dtype=float)
    known = used / total
    if not bool((known >= 0).any()):
        raise missing(f"{name}: nvidia-smi tells no memory in use", launch.path("gpu_samples"))
    known[~(known >= 0)] = -1.0
    fullest = int(known.argmax())
    free = 100.0 * (1.0 - used[fullest] / total[fullest])
    value = file_value(launch, "gpu_samples", "memory_headroom", float(free), "%", n=len(frame))
    text = f"{name}: {used[fullest]:.0f} of {total[fullest]:.0f} MiB at most, {free:.0f} % free"
    return against(value, case.limit(MEMORY_HEADROOM), text)


def _busy(case: Case, names: Sequence[str]) -> tuple[dict[int, float], Measurement, str]:
    """Mean utilization of each GPU in the timed steps, where it is from, and what is too few."""
    import pandas as pd

    parts, sources = [], []
    gpus: set[int] = set()
    for name in names:
        launch, frame = _samples(case, name)
        gpus = gpus or {int(index) for index in frame["index"]}
        timed = frame[_in_timed_steps(case, name, launch, frame)]
        parts.append(timed)
        count = len(timed)
        kind = "gpu_samples"
        sources.append(file_value(launch, kind, kind, float(count), "samples", n=count))
    every = pd.concat(parts)
    counted = partial(derived, sources[0], name="gpu_samples", unit="samples", also=sources)
    counts = {int(str(i)): int(n) for i, n in every["index"].value_counts().items()}
    fewest = min(counts.get(gpu, 0) for gpu in gpus)
    value = counted(value=float(fewest), n=max(1, len(every)))
    if fewest < FEWEST:
        text = f"{fewest} samples of a GPU in the timed steps: too few to tell how busy it was"
        return dict.fromkeys(sorted(gpus), math.nan), value, text
    means = {gpu: float(every.loc[every["index"] == gpu, "utilization_percent"].mean(skipna=False))
             for gpu in sorted(gpus)}  # fmt: skip
    if silent := [str(gpu) for gpu, mean in means.items() if math.isnan(mean)]:
        reason = f"nvidia-smi does not tell how busy GPU {', '.join(silent)} is (as under MIG)"
        raise missing(reason, *(one.path for one in sources))
    return means, value, ""


def _samples(case: Case, name: str) -> tuple[LaunchEvidence, pd.DataFrame]:
    """The samples of the GPUs that this launch's ranks used."""
    launch = case.completed(name)
    frame = launch.gpu_samples
    if frame is None or frame.empty:
        raise missing(f"{name}: no samples of nvidia-smi were taken")
    if absent := [column for column in _COLUMNS if column not in frame]:
        reason = f"{launch.path('gpu_samples')}: the header lacks {', '.join(absent)}"
        raise missing(reason, launch.path("gpu_samples"))
    wanted = launch.launch.nproc
    uuids = (case.env(name).get("device") or {}).get("uuids") or ()
    if uuids and "uuid" in frame:
        used = {str(uuid).removeprefix("GPU-") for uuid in uuids}
        frame = frame[frame["uuid"].astype(str).str.removeprefix("GPU-").isin(used)]
    seen = frame["index"].nunique()
    if seen != wanted:
        reason = f"{name}: samples of {seen} GPU(s) for {wanted} ranks"
        raise missing(reason, launch.path("gpu_samples"))
    return launch, frame


def _in_timed_steps(
    case: Case, name: str, launch: LaunchEvidence, frame: pd.DataFrame
) -> pd.Series[bool]:
    """Which samples tell of nothing but the steps that the throughput rests on."""
    window = effective_rate(case.log(name)).window
    steps = launch.ranks[0].steps if launch.ranks else None
    seconds = sampled_at(launch, frame)
    if steps is None or seconds is None or window is None:
        raise missing(f"{name}: no wall clock in the heartbeats of its steps")
    ended = steps.set_index("step")["ts"]
    begin, end = ended.get(window.first_step - 1), ended.get(window.last_step)
    if begin is None or end is None:
        raise missing(f"{name}: its heartbeats lack the steps that the throughput rests on")
    first, last = float(begin) + _AVERAGED_S, float(end)
    timed = (seconds >= first) & (seconds <= last)
    latest = float(seconds[timed].max()) if timed.any() else first
    if last - latest > max(_SILENT_S, _SILENT_SHARE * (last - first)):
        reason = f"{name}: no samples in the last {last - latest:.1f} s of its timed steps"
        raise missing(reason, launch.path("gpu_samples"))
    return timed
