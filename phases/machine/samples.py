"""What the samples of GPUs show: how busy they were, and what was wrong with them during the steps.

Only those of the GPUs that the ranks used count, and only while they trained: starting a launch
takes longer than the steps of a fast trainer. Rows on load take the samples of all launches of a
phase together; what is suspect is told of each launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from phases.kit import CLOCK_LEAST, OTHERS_SAMPLES, THROTTLED_SHARE, WORKING_PERCENT
from phases.kit.case import Case
from phases.kit.finding import Finding, inconclusive, invalid, missing, skipped
from phases.kit.measure import against, derived, effective_rate, file_value
from runbook.files import utc_text
from runbook.machine.gpu import BITS, THROTTLES
from runbook.records import Measurement, Reason
from runbook.records.evidence import Column, Frame, LaunchEvidence

# Fewer samples of a GPU do not say how busy it was: no pass, and no fault of a fast trainer.
FEWEST = 5
_COLUMNS = ("timestamp", "index", "utilization_percent", "memory_used_mib", "memory_total_mib")
# nvidia-smi's manual: utilization is a mean over the past sixth of a second to one second.
_AVERAGED_S = 1.0
# Samples come five times a second: a sampler that is silent for longer, and for more than this
# share of the timed steps at their end, has ended before them.
_SILENT_S, _SILENT_SHARE = 2.0, 0.1


@dataclass
class Notes:
    """`faults` make the launch suspect, `warnings` are to be read, `seen` is fine."""

    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)


def sampled(launch: LaunchEvidence, gpus: Sequence[Mapping[str, Any]], notes: Notes) -> None:
    """Note faults, warnings and what is fine, of the samples taken during the steps."""
    if all(rank.steps is None for rank in launch.ranks):
        notes.seen.append("it took no step in which the GPUs could be sampled")
        return
    frame = _in_steps(launch)
    if frame is None or frame.empty:
        if any(gpu.get("counters") for gpu in gpus):
            notes.warnings.append("the GPUs were not sampled while the launch trained")
        return
    for gpu in gpus:
        one = _of(frame, gpu)
        where = f"GPU {gpu.get('index')}"
        if one.empty:
            notes.warnings.append(f"{where} was not sampled while the launch trained")
        found = _slow_link(one, gpu.get("link") or {}), _held_back(one), _others(one)
        for text, fatal in chain(*found, _low_clock(one, gpu)):
            (notes.faults if fatal else notes.warnings).append(f"{where}: {text}")
    if "other_processes" not in frame or not bool(frame["other_processes"].notna().any()):
        notes.seen.append("whose processes compute was not told")


def _in_steps(launch: LaunchEvidence) -> Frame | None:
    """The samples between the ends of the first and the last step of rank 0."""
    frame, steps = launch.gpu_samples, launch.ranks[0].steps if launch.ranks else None
    if frame is None or frame.empty or steps is None or "timestamp" not in frame:
        return None
    seconds = sampled_at(launch, frame)
    if seconds is None:
        return None
    return frame[seconds.between(steps["ts"].iloc[0], steps["ts"].iloc[-1])]


def _of(frame: Frame, gpu: Mapping[str, Any]) -> Frame:
    uuid = str(gpu.get("uuid") or "")
    if uuid and "uuid" in frame and bool((frame["uuid"].astype(str) != "").any()):
        return frame[frame["uuid"].astype(str) == uuid]
    return frame[frame["index"] == gpu.get("index")]


# What is told of a GPU, and whether it is a fault.
_Found = Iterator[tuple[str, bool]]


def _slow_link(frame: Frame, link: Mapping[str, Any]) -> _Found:
    """A link that never reached its best under load: resting, it may run slower, working not."""
    for column, best, word in (
        ("pcie_gen", link.get("gen_max"), "generation"),
        ("pcie_width", link.get("width"), "width"),
    ):
        values = [float(v) for v in frame[column].dropna()] if column in frame else []
        if best and len(values) >= FEWEST and max(values) < float(best):
            yield f"PCIe {word} {max(values):g} under load, {float(best):g} possible", True


def _held_back(frame: Frame) -> _Found:
    """Each kind of throttling with its share of the samples."""
    if "throttle_reasons" not in frame:
        return
    masks = [_mask(text) for text in frame["throttle_reasons"].astype(str)]
    known = [mask for mask in masks if mask is not None]
    for bit, words in ((bit, THROTTLES[name]) for name, bit in BITS.items() if name in THROTTLES):
        hit = sum(bool(mask & bit) for mask in known)
        if hit:
            share = hit / len(known)
            text = f"{words} in {hit} of {len(known)} samples, allowed: {THROTTLED_SHARE:.0%}"
            yield text, share > THROTTLED_SHARE


def _low_clock(frame: Frame, gpu: Mapping[str, Any]) -> _Found:
    """The usual SM clock while the GPU works, where it is far under the highest."""
    if frame.empty or "utilization_percent" not in frame:
        return
    clocks = frame.get("sm_clock_mhz")
    highest = gpu.get("sm_max_mhz")
    if clocks is None or not bool(clocks.notna().any()) or not highest:
        yield "its SM clock, or the highest, was not told", False
        return
    working = clocks[frame["utilization_percent"] > WORKING_PERCENT].dropna()
    if len(working) >= FEWEST and float(working.median()) < CLOCK_LEAST * float(highest):
        text = (
            f"SM clock {float(working.median()):g} MHz of {float(highest):g} in {len(working)} "
            f"samples in which it worked, at least {CLOCK_LEAST:.0%} is usual (nvidia-smi -rgc and "
            "-rac take set clocks back; else look at power and cooling)"
        )
        yield text, True


def _mask(text: str) -> int | None:
    try:
        return int(text, 16)
    except ValueError:
        return None


def _others(frame: Frame) -> _Found:
    """Processes of somebody else that computed there; seen once, one may have been ending."""
    shared = frame[frame["other_processes"] > 0] if "other_processes" in frame else frame[:0]
    if not shared.empty:
        names = shared["others"].iloc[-1] if "others" in shared else ""
        text = f"another process computed there ({names or 'unnamed'}) in {len(shared)} samples"
        yield text, len(shared) >= OTHERS_SAMPLES


def sampled_at(launch: LaunchEvidence, frame: Frame) -> Column | None:
    """When each of these samples was taken, on the clock of rank 0's steps (s); NaN if unreadable.

    None where the steps have no wall clock. Raises a finding where the samples are of another
    time than the steps.
    """
    import pandas as pd

    steps = launch.ranks[0].steps if launch.ranks else None
    if steps is None or steps.empty or "ts" not in steps or not bool(steps["ts"].notna().all()):
        return None
    begin, end = float(steps["ts"].iloc[0]), float(steps["ts"].iloc[-1])
    when = pd.to_datetime(frame["timestamp"], format="%Y/%m/%d %H:%M:%S.%f", errors="coerce")
    seconds = (when - pd.Timestamp(0)).dt.total_seconds()
    if seconds.max() < begin or seconds.min() > end:
        path = launch.path("gpu_samples")
        reason = (
            f"{path} is of another time: its last sample is of {frame['timestamp'].max()}, "
            f"the last step ended at {utc_text(datetime.fromtimestamp(end, tz=UTC))}"
        )
        raise invalid(Reason.MISMATCH, reason, evidence=(path,), topic="devices")
    return seconds


# -- how busy they were ----------------------------------------------------------------------------


def utilisation(case: Case, names: Sequence[str]) -> Finding:
    """Mean utilization of the least busy GPU over the timed steps of all launches."""
    case.require_gpu("has")
    means, value = _busy(case, names)
    least = min(means, key=lambda index: means[index])
    text = f"least busy is GPU {least} with {means[least]:.0f} % in the timed steps"
    value = derived(value, name="gpu_utilisation", value=means[least], unit="%")
    return against(value, case.limit("gpu_utilisation"), text)


def balance(case: Case, names: Sequence[str]) -> Finding:
    """Difference of mean utilization between the busiest and the least busy GPU."""
    case.require_gpu("has")
    if case.profile.ranks < 2:
        return skipped(Reason.NEEDS_GPUS, "balance needs at least two GPUs")
    means, value = _busy(case, names)
    spread = max(means.values()) - min(means.values())
    value = derived(value, name="gpu_imbalance", value=spread, unit="percentage points")
    each = ", ".join(f"GPU {index} {mean:.0f} %" for index, mean in means.items())
    return against(value, case.limit("gpu_imbalance"), each)


def headroom(case: Case, name: str) -> Finding:
    """Share of memory that was free on the fullest GPU at its fullest moment."""
    case.require_gpu("has")
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
    return against(value, case.limit("memory_headroom"), text)


def _busy(case: Case, names: Sequence[str]) -> tuple[dict[int, float], Measurement]:
    """Mean utilization of each GPU in the timed steps, and where it is from.

    Raises a finding where too few samples tell it.
    """
    import pandas as pd

    parts, sources = [], []
    gpus: set[int] = set()
    for name in names:
        launch, frame = _samples(case, name)
        gpus = gpus or {int(index) for index in frame["index"]}
        parts.append(_in_timed_steps(case, name, launch, frame))
        sources.append(file_value(launch, "gpu_samples", "gpu_samples", 0.0, "samples"))
    every = pd.concat(parts)
    fewest = min(int((every["index"] == gpu).sum()) for gpu in gpus)
    value = derived(sources[0], value=float(fewest), n=max(1, len(every)), also=sources)
    if fewest < FEWEST:
        text = f"{fewest} samples of a GPU in the timed steps: too few to tell how busy it was"
        raise inconclusive(Reason.TOO_FEW_SAMPLES, text, measurement=value)
    means = {gpu: float(every.loc[every["index"] == gpu, "utilization_percent"].mean(skipna=False))
             for gpu in sorted(gpus)}  # fmt: skip
    if silent := [str(gpu) for gpu, mean in means.items() if math.isnan(mean)]:
        reason = f"nvidia-smi does not tell how busy GPU {', '.join(silent)} is (as under MIG)"
        raise missing(reason, *(one.path for one in sources))
    return means, value


def _samples(case: Case, name: str) -> tuple[LaunchEvidence, Frame]:
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


def _in_timed_steps(case: Case, name: str, launch: LaunchEvidence, frame: Frame) -> Frame:
    """The samples that tell of nothing but the steps that the throughput rests on."""
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
    timed = seconds.between(first, last)
    latest = float(seconds[timed].max()) if timed.any() else first
    if last - latest > max(_SILENT_S, _SILENT_SHARE * (last - first)):
        reason = f"{name}: no samples in the last {last - latest:.1f} s of its timed steps"
        raise missing(reason, launch.path("gpu_samples"))
    return frame[timed]
