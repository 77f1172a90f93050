"""How long a launch takes: as in the last run, as the profile says, or as the target implies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.cli._headline import short_duration
from runbook.cli._runs import load_run, run_folders
from runbook.errors import RunbookError
from runbook.records import Launch, RunRecord

if TYPE_CHECKING:
    from runbook.config import Profile

__all__ = ["Estimate", "Estimator"]

_THROUGHPUT_LIMIT = "throughput"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds, if anything is known, and in words where they come from."""

    seconds: float | None
    timeout_s: float
    text: str


class Estimator:
    """Estimates from the newest run of the same profile that ended well, launch by launch."""

    def __init__(self, profile: Profile, out_dir: Path) -> None:
        self._profile = profile
        self._earlier = _newest(profile.name, out_dir)

    def estimate(self, launch: Launch) -> Estimate:
        """The estimate of one launch."""
        return (
            self._from_earlier(launch)
            or self._from_profile(launch)
            or self._from_target(launch)
            or Estimate(seconds=None, timeout_s=launch.timeout_s, text="time not known yet")
        )

    def _from_earlier(self, launch: Launch) -> Estimate | None:
        if self._earlier is None:
            return None
        for phase in self._earlier.phases:
            for entry in phase.launches:
                then = entry.launch
                same = (then.phase, then.name) == (launch.phase, launch.name)
                if same and entry.result.ok and then.steps == launch.steps:
                    return self._words(
                        launch, entry.result.duration_s, f"as in run {self._earlier.run_id}"
                    )
        return None

    def _from_profile(self, launch: Launch) -> Estimate | None:
        typical = self._profile.phases[launch.phase].typical_s
        if typical is None:
            return None
        return self._words(launch, typical, "the profile's figure for its own step counts")

    def _from_target(self, launch: Launch) -> Estimate | None:
        limit = self._profile.limits.get(_THROUGHPUT_LIMIT)
        gated = self._profile.throughput_gated and limit is not None and limit.gated
        if launch.kind != "trainer" or limit is None or not gated or not launch.steps:
            return None
        seconds = launch.steps * self._profile.workload.tokens_per_step / limit.value
        return self._words(launch, seconds, f"at the floor of {limit.value:g} {limit.unit}")

    def _words(self, launch: Launch, seconds: float, source: str) -> Estimate:
        if seconds > launch.timeout_s:
            text = f"would take {short_duration(seconds)} ({source}), longer than it may"
            return Estimate(seconds=launch.timeout_s, timeout_s=launch.timeout_s, text=text)
        text = f"about {short_duration(seconds)} ({source})"
        return Estimate(seconds=seconds, timeout_s=launch.timeout_s, text=text)


def _newest(profile: str, out_dir: Path) -> RunRecord | None:
    for folder in reversed(run_folders(out_dir)):
        try:
            record = load_run(folder)
        except RunbookError:
            # A damaged run is no ground for an estimate; `runbook report` says what is wrong.
            continue
        if record.profile == profile:
            return record
    return None
