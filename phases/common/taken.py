"""Do the documents about GPUs and kernel belong to this launch, by the times that they tell?"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from phases.common.case import Unanswerable, invalid, missing
from phases.limits import TAKEN_EARLY_S, TAKEN_LATE_S
from runbook.folder.names import DEVICES_AFTER_JSON, DEVICES_BEFORE_JSON, KERNEL_LOG_JSON
from runbook.records import Reason
from runbook.records.evidence import LaunchEvidence

if TYPE_CHECKING:
    import pandas as pd


def require_own_times(
    launch: LaunchEvidence,
    *,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    kernel: Mapping[str, Any],
) -> None:
    """Raise Unanswerable unless each document was written when the launch began, or ended.

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
            raise Unanswerable(invalid(Reason.DAMAGED_ARTIFACT, reason, evidence=(path,)))
        if not -TAKEN_EARLY_S <= told - expected <= TAKEN_LATE_S:
            reason = (
                f"{path} is of another time: {key} {document[key]}, the launch {word} at "
                f"{_text(expected)}"
            )
            raise Unanswerable(invalid(Reason.MISMATCH, reason, evidence=(path,), topic="devices"))


def sampled_at(launch: LaunchEvidence, frame: pd.DataFrame) -> pd.Series[float] | None:
    """When each of these samples was taken, on the clock of rank 0's steps (s); NaN if unreadable.

    None where the steps have no wall clock. Raises Unanswerable where the samples are of another
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
        path = launch.gpu_samples_path
        reason = (
            f"{path} is of another time: its last sample is of {frame['timestamp'].max()}, "
            f"the last step ended at {_text(end)}"
        )
        raise Unanswerable(invalid(Reason.MISMATCH, reason, evidence=(path,), topic="devices"))
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
