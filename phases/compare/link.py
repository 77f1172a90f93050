"""What the link between the ranks allows, and whether that explains a scaling that is too small."""

from __future__ import annotations

from nsa.contract import Ceiling
from phases.kit.case import Case, Finding, failed, invalid, missing, passed
from phases.kit.measure import decided, derived
from phases.machine.ceilings import as_measurement, measured, other_devices, slowest
from runbook.accounts.workload import Workload
from runbook.config.limits import Limit
from runbook.records import Measurement, Outcome, Reason
from runbook.stats.decision import Decision

_WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}


def without_overlap(case: Case, one: Measurement) -> Measurement:
    """E of a step that first computes and then exchanges its gradients: T / (T + link).

    `one` is what a single device does with its share of the batch, tok/s: from it follows T. The
    link's time is that of an all-reduce of all gradients, at the bus bandwidth that preflight
    measured, and of one small one for each bucket. Raises a finding where a part is missing.
    """
    before, baseline = case.earlier("preflight"), case.earlier("baseline")
    first = next(iter(baseline.evidence.launches))
    env = baseline.env(first)
    if strange := other_devices(before, env):
        raise invalid(Reason.NOT_COMPARABLE, strange, measurement=one)
    reduce = slowest(before, Ceiling.ALL_REDUCE)
    small = max(measured(before, Ceiling.LATENCY), key=lambda found: found.seconds)
    size, buckets = _gradients(baseline, first)
    ranks = case.profile.ranks
    on_bus = 2 * (ranks - 1) / ranks * size
    link_s = on_bus / (float(reduce.value) * 1e9) + buckets * small.seconds
    work_s = _tokens(baseline, first) / ranks / float(one.value)
    note = (
        f"without overlap {work_s * 1e3:.4g} ms of work and {link_s * 1e3:.4g} ms for "
        f"{size / 1e6:.4g} MB of gradients in {buckets} bucket(s) at {float(reduce.value):.4g} "
        f"GB/s give E = {work_s / (work_s + link_s):.3f}"
    )
    return derived(
        one,
        name="scaling_without_overlap",
        value=work_s / (work_s + link_s),
        unit="",
        note=note,
        also=[reduce, as_measurement(before, Ceiling.LATENCY, small)],
    )


def _tokens(baseline: Case, name: str) -> float:
    tokens = (baseline.env(name).get("effective") or {}).get("tokens_per_step") or 0
    if tokens < 1:
        raise missing(f"{name}: env.json has no tokens_per_step", baseline.launch(name).path("env"))
    return float(tokens)


def _gradients(baseline: Case, name: str) -> tuple[float, int]:
    """Bytes that each rank sends in a step, and in how many buckets."""
    launch, env = baseline.completed(name), baseline.env(name)
    try:
        wire = Workload.of(env).wire
    except ValueError as error:
        raise missing(f"{name}: {error}", launch.path("env")) from error
    parameters = (env.get("effective") or {}).get("n_params") or 0
    told = launch.ranks[0].ddp_buckets if launch.ranks else ()
    sizes = (told[-1].get("sizes_mib") or ()) if told else ()
    if wire not in _WIDTH or parameters < 1 or not sizes:
        reason = f"{name} does not tell its parameters, their type on the wire and the buckets"
        raise missing(reason, launch.path("env"), *(rank.path for rank in launch.ranks[:1]))
    return float(parameters * _WIDTH[wire]), len(sizes)


def explained(
    value: Measurement, expected: Measurement, limit: Limit, decision: Decision
) -> Finding:
    """PASS where E reaches its limit; else FAIL for the settings, or INVALID for the link.

    `value` is E, `expected` that without overlap. The settings are to blame where E, its interval
    included, is under what even this link gives with nothing done at the same time.
    """
    found, floor = float(value.value), float(expected.value)
    if decision.outcome.as_check is Outcome.INVALID:
        return decided(decision, value)
    text = f"E = {found:.3f}; {expected.note}"
    both = derived(
        value,
        name=expected.name,
        value=floor,
        unit="",
        note=expected.note,
        also=[value, expected],
    )
    if limit.holds(found):
        return passed(text, measurement=both)
    most = value.interval[1] if value.interval else found
    if most < floor:
        reason = f"{text}: below even that, so the link does not explain it: a setting, or the host"
        return failed(Reason.BELOW_LIMIT, reason, measurement=both, limit=limit, topic="overlap")
    reason = f"{text}: the link explains it, not a setting"
    return invalid(Reason.WRONG_ENVIRONMENT, reason, measurement=both, limit=limit, topic="link")
