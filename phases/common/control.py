"""Does the control arm of a comparison reproduce the baseline phase?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from phases.common.case import Case, Finding, inconclusive, invalid, passed, skipped
from phases.common.measure import derived, effective_rate
from phases.common.plausible import differences
from phases.limits import CONTROL_LEAST
from runbook.records import Reason
from runbook.records.measurement import TOKENS_PER_SECOND

# Two-sided error of the prediction interval.
_ERROR = 0.01


def reproduces_baseline(
    case: Case, *, launch: str, arm: str | None, but: Sequence[str] = ()
) -> Finding:
    """PASS if the control arm's throughput lies where one more baseline launch would.

    99 % prediction interval of one further launch, on the log scale. `but` as in `differences`.
    """
    if "baseline" not in case.evidence.earlier:
        return skipped(Reason.NOT_ASKED_FOR, "the baseline phase is not part of this run")
    control = effective_rate(case.log(launch), arm=arm)
    if not case.profile.throughput_gated:
        reason = f"control arm {control}; throughput is not gated on profile {case.profile.name}"
        return skipped(Reason.NOT_GATED, reason, measurement=control)
    before = case.earlier("baseline")
    names = list(before.evidence.launches)
    unlike = differences(before.env(names[0]), case.env(launch), but=but)
    paths = (before.launch(names[0]).env_path, case.launch(launch).env_path)
    if unlike:
        reason = f"settings differ from the baseline's: {'; '.join(unlike)}"
        return invalid(Reason.NOT_COMPARABLE, reason, evidence=paths)
    launches = [effective_rate(before.log(name)) for name in names]
    rates = [float(rate.value) for rate in launches]
    if len(rates) < 2:
        reason = "one baseline launch has no interval; `--protocol single` cannot check its control"
        return inconclusive(Reason.TOO_FEW_SAMPLES, reason, measurement=control)
    low, high = _prediction_interval(rates)
    value = derived(
        control,
        name="control",
        value=float(control.value),
        unit=TOKENS_PER_SECOND,
        interval=(low, high),
        also=launches,
    )
    expected = f"one more baseline launch: {low:.4g} to {high:.4g}"
    reason = f"control {float(control.value):.4g} tok/s, {expected}"
    if low <= float(control.value) <= high:
        return passed(reason, measurement=value, evidence=paths)
    return invalid(Reason.NOT_COMPARABLE, reason, measurement=value, evidence=paths)


def _prediction_interval(rates: Sequence[float]) -> tuple[float, float]:
    """Where one more launch falls in 99 % of cases, at least 5 % to either side."""
    from runbook.stats.pairs import t_quantile

    logs = [math.log(rate) for rate in rates]
    count = len(logs)
    mean = sum(logs) / count
    spread = math.sqrt(sum((value - mean) ** 2 for value in logs) / (count - 1))
    reach = t_quantile(_ERROR / 2, count - 1) * spread * math.sqrt(1 + 1 / count)
    half = max(reach, math.log1p(CONTROL_LEAST))
    return math.exp(mean - half), math.exp(mean + half)
