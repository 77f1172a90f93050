"""NVTX profiling: where the time goes, and that it does not go into Python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from phases.kit import specs
from phases.kit.case import Case, optional
from phases.kit.commands import environment, scaled, trainer_launch
from phases.kit.finding import Finding, failed, invalid, missing, passed
from phases.kit.measure import against, file_value
from phases.kit.rows import Row, RowPhase, contract_only
from phases.training import toggles_row, training_rows
from runbook.config.registry import Judgement, PlanContext
from runbook.records import Launch, Measurement, Reason, Table
from runbook.records.evidence import LaunchEvidence
from runbook.records.launch import PROFILE_FLAG

_LAUNCH = "profiled"
_RANGE = "nsa.sel.ranges_v2"
# Each number of the summary is rounded by itself.
_ROUNDING_US = 0.3
_ENV = {"NSA_NVTX": "1", "NSA_TB_DISABLE": "1", "NSA_DISABLE_AUX_STATS": "1"}


class Nvtx(RowPhase):
    """Requirements N1 to N5."""

    name = "nvtx"
    order = 60
    title = "NVTX profiling"
    source = "requirements N1 to N5"
    question = "Does v2 run, and is no Python hotspot dominating?"
    limits = specs("python_share", "python_hotspot", "flaky_launches")

    def compares(self, context: PlanContext) -> Mapping[str, str]:  # noqa: ARG002
        """Its own launch is the one with the ranges."""
        return {"NSA_NVTX": "1"}

    @contract_only
    def plan(self, context: PlanContext) -> list[Launch]:
        """One profiled launch without TensorBoard and aux stats; a shorter one if it hangs."""
        settings = context.profile.phases[self.name]
        return [
            trainer_launch(
                context,
                phase=self.name,
                name=_LAUNCH,
                env=environment(context, self.name, extra=_ENV),
                extra=(PROFILE_FLAG, str(settings.profile_steps)),
                retry_steps=scaled(settings.retry_steps, context) if settings.retry_steps else None,
                purpose="profiler trace with the ranges of the attention",
            )
        ]

    def rows(self) -> Sequence[Row]:
        """The range is there, the trace is kept, Python's share is named and small."""
        return (
            *training_rows(self.names),
            toggles_row(self.names, but=("NSA_NVTX",)),
            self.row.one("range_present", _range_present),
            self.row.one("trace_kept", _trace_kept),
            self.row.one("python_share", _python_share),
            self.row.one("python_hotspot", _hotspot),
        )

    def details(self, case: Case) -> Judgement:
        """Time per range, and the Python functions that took most."""
        profile = optional(lambda: _profile(case)[1])
        if profile is None:
            return Judgement()
        ranges = Table(
            title="Time per range",
            columns=("range", "count", "CPU us", "CUDA us"),
            rows=tuple(
                (name, int(item.get("count") or 0), item.get("cpu_us"), item.get("cuda_us"))
                for name, item in sorted((profile.get("ranges") or {}).items())
            ),
            note=f"{profile.get('steps')} profiled steps of rank 0",
        )
        top = Table(
            title="Python functions that took most",
            columns=("function", "share of the steps"),
            rows=tuple((str(item.get("name")), item.get("share")) for item in _top(profile)[:5]),
        )
        return Judgement(tables=(ranges, top))


def _profile(case: Case) -> tuple[LaunchEvidence, Mapping[str, Any]]:
    launch = case.completed(_LAUNCH)
    if launch.profile is None:
        raise missing("the profiler wrote no readable summary", launch.path("console"))
    return launch, launch.profile


def _top(profile: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sorted(
        profile.get("top_python") or (), key=lambda item: -float(item.get("share") or 0.0)
    )


def _value(launch: LaunchEvidence, name: str, value: float, **more: Any) -> Measurement:
    note = f"{(launch.profile or {}).get('steps')} profiled steps"
    return file_value(launch, "profile", name, value, **{"note": note, **more})


def _range_present(case: Case) -> Finding:
    launch, profile = _profile(case)
    refused = [effect for effect in launch.effects("NSA_NVTX") if effect.took_effect is False]
    ranges = profile.get("ranges") or {}
    if refused or not ranges:
        reason = f"NSA_NVTX=1 did nothing: {refused[0].evidence if refused else 'no range at all'}"
        return invalid(Reason.NO_EFFECT, reason, evidence=(launch.path("profile"),))
    count = int((ranges.get(_RANGE) or {}).get("count") or 0)
    if count == 0:
        reason = f"{_RANGE} never ran; the trace has {', '.join(sorted(ranges))}"
        return failed(Reason.MISMATCH, reason, measurement=_value(launch, _RANGE, 0.0))
    value = _value(launch, _RANGE, float(count), n=count, unit="calls")
    return passed(f"{_RANGE} ran {count} times", measurement=value)


def _trace_kept(case: Case) -> Finding:
    launch, _ = _profile(case)
    if not launch.path("trace"):
        raise missing("there is a summary but no trace file", launch.path("profile"))
    value = file_value(launch, "trace", "trace", launch.path("trace"))
    return passed(f"{launch.path('trace')}", measurement=value)


def _python_share(case: Case) -> Finding:
    if case.profile.has_gpu:
        value = _waited_for(case)
        text = f"the GPU waits for Python in {float(value.value):.0%} of a step; {value.note}"
        return _shares(case, value, "python_share", text)
    launch, profile = _profile(case)
    share = profile.get("python_share")
    if not isinstance(share, (int, float)):
        raise missing("the profile has no share of Python", launch.path("profile"))
    value = _value(launch, "python_share", float(share))
    return _shares(case, value, "python_share", f"{float(share):.0%} of the profiled time")


def _waited_for(case: Case) -> Measurement:
    """Share of an ordinary step in which the GPU has nothing to do because Python is busy.

    The profiler slows the host and not the kernels: what the device is busy for in a profiled step
    is held against the middle step of the launch, and of the rest Python has the part that it has
    of the device's idle time in the trace.
    """
    launch, profile = _profile(case)
    gpu = profile.get("gpu") or {}
    names = ("window_us", "busy_us", "idle_us", "python_wait_us")
    window, busy, idle, python = (float(gpu.get(name, math.nan)) for name in names)
    steps = int(profile.get("steps") or 0)
    if math.isnan(window + busy + idle + python) or steps < 1:
        raise missing("the trace shows no work on the GPU", launch.path("profile"))
    if not (0 <= python <= idle + _ROUNDING_US and 0 < busy <= window + _ROUNDING_US):
        text = f"the GPU is busy for {busy:g} us of {window:g}, idle for {idle:g}, {python:g} of it"
        raise invalid(
            Reason.NOT_PLAUSIBLE, text, evidence=(launch.path("profile"),), topic="plausible"
        )
    log = case.log(_LAUNCH)
    step_us = 1e6 * float(log.frame["dt_s"].median())
    waits = max(0.0, 1 - busy / steps / step_us)
    share = waits * (python / idle if idle > 0 else 0.0)
    note = (
        f"busy {busy / steps / 1000:.1f} ms of {step_us / 1000:.1f} ms; "
        f"of the rest Python has {python / idle if idle > 0 else 0.0:.0%}"
    )
    return _value(launch, "python_wait_share", share, n=steps, note=note)


def _hotspot(case: Case) -> Finding:
    launch, profile = _profile(case)
    top = _top(profile)
    if not top:
        raise missing("the profile has no Python function", launch.path("profile"))
    share = float(top[0].get("share") or 0.0)
    text = f"{top[0].get('name')}: {share:.0%}"
    if case.profile.has_gpu:
        # No function costs the GPU more than all of Python does.
        waits = float(_waited_for(case).value)
        text += f" of the host's time, and the GPU waits for Python in {waits:.0%} of a step"
        share = min(share, waits)
    value = _value(launch, "python_hotspot", share, n=len(top))
    return _shares(case, value, "python_hotspot", text)


def _shares(case: Case, value: Measurement, limit: str, text: str) -> Finding:
    share = float(value.value)
    if not 0.0 <= share <= 1.0:
        return invalid(
            Reason.NOT_PLAUSIBLE, f"{text}: not a share between 0 and 1", measurement=value
        )
    return against(value, case.limit(limit), text)
