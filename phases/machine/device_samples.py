"""What the samples during the steps show: links under load, clocks held back, other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from phases.kit.case import invalid, missing
from phases.kit.limits import (
    CLOCK_LEAST,
    OTHERS_SAMPLES,
    TAKEN_EARLY_S,
    TAKEN_LATE_S,
    THROTTLED_SHARE,
    WORKING_PERCENT,
)
from runbook.folder import DEVICES_AFTER_JSON, DEVICES_BEFORE_JSON, KERNEL_LOG_JSON
from runbook.records import Reason
from runbook.records.evidence import LaunchEvidence

if TYPE_CHECKING:
    import pandas as pd

# Fewer samples of a GPU do not say how busy it was: no pass, and no fault of a fast trainer.
FEWEST = 5
# NVML's bits for clocks that were cut because the card is too hot or its power fails. A power cap,
# set clocks and idling are by design.
_THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


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
        link = gpu.get("link") or {}
        notes.faults += [f"{where}: {text}" for text in _slow_link(one, link)]
        for text, fatal in (*_held_back(one), *_others(one), *_low_clock(one, gpu)):
            (notes.faults if fatal else notes.warnings).append(f"{where}: {text}")
    if "other_processes" not in frame or not bool(frame["other_processes"].notna().any()):
        notes.seen.append("whose processes compute was not told")


def _in_steps(launch: LaunchEvidence) -> pd.DataFrame | None:
    """The samples between the ends of the first and the last step of rank 0."""
    frame, steps = launch.gpu_samples, launch.ranks[0].steps if launch.ranks else None
    if frame is None or frame.empty or steps is None or "timestamp" not in frame:
        return None
    seconds = sampled_at(launch, frame)
    if seconds is None:
        return None
    begin, end = float(steps["ts"].iloc[0]), float(steps["ts"].iloc[-1])
    return frame[(seconds >= begin) & (seconds <= end)]


def _of(frame: pd.DataFrame, gpu: Mapping[str, Any]) -> pd.DataFrame:
    uuid = str(gpu.get("uuid") or "")
    if uuid and "uuid" in frame and bool((frame["uuid"].astype(str) != "").any()):
        return frame[frame["uuid"].astype(str) == uuid]
    return frame[frame["index"] == gpu.get("index")]


def _slow_link(frame: pd.DataFrame, link: Mapping[str, Any]) -> list[str]:
    """A link that never reached its best under load: resting, it may run slower, working not."""
    found = []
    for column, best, word in (
        ("pcie_gen", link.get("gen_max"), "generation"),
        ("pcie_width", link.get("width"), "width"),
    ):
        values = [float(v) for v in frame[column].dropna()] if column in frame else []
        if best and len(values) >= FEWEST and max(values) < float(best):
            found.append(f"PCIe {word} {max(values):g} under load, {float(best):g} possible")
    return found


def _held_back(frame: pd.DataFrame) -> list[tuple[str, bool]]:
    """Each kind of throttling with its share of the samples; True where the share is too large."""
    if "throttle_reasons" not in frame:
        return []
    masks = [_mask(text) for text in frame["throttle_reasons"].astype(str)]
    known = [mask for mask in masks if mask is not None]
    found = []
    for bit, words in _THROTTLES.items():
        hit = sum(bool(mask & bit) for mask in known)
        if hit:
            share = hit / len(known)
            text = f"{words} in {hit} of {len(known)} samples, allowed: {THROTTLED_SHARE:.0%}"
            found.append((text, share > THROTTLED_SHARE))
    return found


def _low_clock(frame: pd.DataFrame, gpu: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """The usual SM clock while the GPU works, where it is far under the highest; True: a fault."""
    if frame.empty or "utilization_percent" not in frame:
        return []
    clocks = frame.get("sm_clock_mhz")
    highest = gpu.get("sm_max_mhz")
    if clocks is None or not bool(clocks.notna().any()) or not highest:
        return [("its SM clock, or the highest, was not told", False)]
    working = clocks[frame["utilization_percent"] > WORKING_PERCENT].dropna()
    if len(working) < FEWEST or float(working.median()) >= CLOCK_LEAST * float(highest):
        return []
    text = (
        f"SM clock {float(working.median()):g} MHz of {float(highest):g} in {len(working)} samples "
        f"in which it worked, at least {CLOCK_LEAST:.0%} is usual (nvidia-smi -rgc and -rac take "
        "set clocks back; else look at power and cooling)"
    )
    return [(text, True)]


def _mask(text: str) -> int | None:
    try:
        return int(text, 16)
    except ValueError:
        return None


def _others(frame: pd.DataFrame) -> list[tuple[str, bool]]:
    """Processes of somebody else that computed there; seen once, one may have been ending."""
    if "other_processes" not in frame:
        return []
    shared = frame[frame["other_processes"] > 0]
    if shared.empty:
        return []
    names = shared["others"].iloc[-1] if "others" in shared else ""
    text = f"another process computed there ({names or 'unnamed'}) in {len(shared)} samples"
    return [(text, len(shared) >= OTHERS_SAMPLES)]


def require_own_times(
    launch: LaunchEvidence,
    *,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    kernel: Mapping[str, Any],
) -> None:
    """Raise a finding unless each document was written when the launch began, or ended.

    What was taken at another time says nothing of this launch, however healthy it looks.
    """
    begun = _seconds(launch.result.started_at)
    if begun is None:
        raise missing(f"{launch.launch.name}: the record does not tell when it was started")
    ended = begun + launch.result.duration_s
    for file, document, key, expected, word in (
        (DEVICES_BEFORE_JSON, before, "taken_at", begun, "began"),
        (DEVICES_AFTER_JSON, after, "taken_at", ended, "ended"),
        (KERNEL_LOG_JSON, kernel, "began_at", begun, "began"),
        (KERNEL_LOG_JSON, kernel, "ended_at", ended, "ended"),
    ):
        told = _seconds(document.get(key))
        path = f"{launch.launch.run_dir}/{file}"
        if told is None:
            reason = f"{path}: it does not tell {key}"
            raise invalid(Reason.DAMAGED_ARTIFACT, reason, evidence=(path,))
        if not -TAKEN_EARLY_S <= told - expected <= TAKEN_LATE_S:
            reason = (
                f"{path} is of another time: {key} {document[key]}, the launch {word} at "
                f"{_text(expected)}"
            )
            raise invalid(Reason.MISMATCH, reason, evidence=(path,), topic="devices")


def sampled_at(launch: LaunchEvidence, frame: pd.DataFrame) -> pd.Series[float] | None:
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
            f"the last step ended at {_text(end)}"
        )
        raise invalid(Reason.MISMATCH, reason, evidence=(path,), topic="devices")
    return seconds


def _seconds(text: object) -> float | None:
    """Seconds of a time with its zone, such as `2026-01-31T12:00:00Z`; None if it is none."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo else None


def _text(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, tz=UTC):%Y-%m-%dT%H:%M:%SZ}"
