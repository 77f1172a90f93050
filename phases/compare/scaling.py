"""Scaling: some of a run's ranks that train alone, E between two numbers of ranks, and the link.

One rank, and where a run is spread over several nodes all ranks of the first 1, 2, 4, ... of them,
each with the batch that it has in the whole run: what is lost between two numbers of ranks is the
cost of working together (weak scaling).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile

from nsa.contract import Ceiling
from nsa.settings import CONFIG_TOGGLES
from nsa.toggles import TOGGLES
from phases.kit.case import Case, once
from phases.kit.commands import repeated
from phases.kit.finding import Finding, failed, invalid, missing, passed
from phases.kit.measure import decided, derived
from phases.machine.ceilings import as_measurement, measured, other_devices, slowest
from phases.training.plausible import differences
from runbook.accounts.workload import Workload
from runbook.config.limits import Limit
from runbook.config.phase import PlanContext
from runbook.records import Launch, Measurement, Outcome, Reason
from runbook.stats.decision import Decision

_WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
# What may differ between numbers of ranks: their number, and DDP itself.
RANKS = (
    "world_size",
    "effective.world_size",
    "versions.nccl",
    *(f"toggles.{name}" for name in TOGGLES if name.startswith("NSA_DDP_")),
)
_BATCH = "train.batch_size"
# The toggle by which a profile of more than two cards says the same.
_BATCH_TOGGLE = next(name for name, key in CONFIG_TOGGLES.items() if key == _BATCH)
# At one batch per rank also the global one, and what follows from it.
_GROWN = (
    *RANKS,
    "effective.global_batch",
    "effective.tokens_per_step",
    f"config.{_BATCH}",
    f"toggles.{_BATCH_TOGGLE}",
    "config_sha256",
)


@dataclass(frozen=True, kw_only=True)
class Subset:
    """So many `ranks` on the first `nodes`; its launches are called `name` and a number."""

    name: str
    nodes: int
    ranks: int


ONE_RANK = Subset(name="share", nodes=1, ranks=1)


def numbers_of_nodes(context: PlanContext) -> list[int]:
    """1, 2, 4, ... below the run's own number of nodes; none where that compares nothing new.

    On one node there is none. On two nodes with one rank each the only one would be a node with one
    rank, and that is the single rank with which the whole is compared anyway.
    """
    powers = (1 << power for power in count())
    below = list(takewhile(lambda nodes: nodes < context.nodes, powers))
    return below if any(of_nodes(context, nodes) != ONE_RANK for nodes in below) else []


def of_nodes(context: PlanContext, nodes: int) -> Subset:
    """All ranks of the first `nodes`; those of one node with one rank are the single rank."""
    ranks = context.profile.ranks // context.nodes * nodes
    return Subset(name=f"nodes{nodes}_", nodes=nodes, ranks=ranks) if ranks > 1 else ONE_RANK


def subsets(context: PlanContext) -> list[Subset]:
    """What is launched: nothing where neither throughput decides nor nodes are compared."""
    profile, nodes = context.profile, numbers_of_nodes(context)
    if profile.ranks < 2 or profile.own_trainer or not (profile.throughput_gated or nodes):
        return []
    return list(dict.fromkeys((ONE_RANK, *(of_nodes(context, number) for number in nodes))))


def subset_launches(subset: Subset, context: PlanContext, phase: str) -> list[Launch]:
    """As many launches of a subset as the phase has of each arm."""
    alone = subset.ranks == 1
    purpose = (
        "one rank's share of the batch on one device"
        if alone
        else f"the same batch per rank on {subset.nodes} of {context.nodes} nodes"
    )
    planned = repeated(
        context, phase=phase, purpose=purpose, ddp=not alone, nodes=subset.nodes, named=subset.name
    )
    whole = context.config_overrides.get(_BATCH, context.profile.workload.global_batch)
    batch = int(whole) // context.profile.ranks * subset.ranks
    return [launch.model_copy(update=_of_batch(launch, batch)) for launch in planned]


def _of_batch(launch: Launch, batch: int) -> dict[str, object]:
    """What differs of a launch with this global batch, which it is given in one way only."""
    env = {name: text for name, text in launch.env.items() if name != _BATCH_TOGGLE}
    return {"env": env, "config_overrides": {**launch.config_overrides, _BATCH: batch}}


@dataclass(frozen=True, kw_only=True)
class Side:
    """Launches that are alike, by name, and the case that they are read from."""

    case: Case
    names: Sequence[str]
    ranks: int
    nodes: int = 1


def side_of(case: Case, subset: Subset) -> Side:
    """A subset's launches, in the case in which its batch is the whole one."""
    names = [launch.name for launch in subset_launches(subset, case.context, case.phase)]
    return Side(case=_case(case, subset.name), names=names, ranks=subset.ranks, nodes=subset.nodes)


def whole_side(case: Case) -> Side:
    """The launches of the baseline, on all ranks."""
    before = case.earlier("baseline")
    names = list(before.evidence.launches)
    return Side(case=before, names=names, ranks=case.profile.ranks, nodes=case.context.nodes)


@once
def _case(case: Case, name: str) -> Case:
    subset = next(one for one in subsets(case.context) if one.name == name)
    work = case.profile.workload
    batch = work.global_batch // case.profile.ranks * subset.ranks
    smaller = work.model_copy(update={"global_batch": batch})
    profile = case.profile.model_copy(update={"workload": smaller})
    context = replace(case.context, profile=profile)
    return Case(phase=case.phase, evidence=case.evidence, context=context)


def unlike_baseline(
    case: Case, names: Sequence[str], *, but: Sequence[str] = _GROWN
) -> Finding | None:
    """INVALID if the first of these launches differs from a launch of the baseline, but for `but`.

    Raises a finding where the baseline or an env.json is missing.
    """
    before = case.earlier("baseline")
    for first in before.evidence.launches:
        unlike = differences(before.env(first), case.env(names[0]), but=but)
        paths = (before.launch(first).path("env"), case.launch(names[0]).path("env"))
        if unlike:
            reason = f"baseline against {names[0]}: {'; '.join(unlike)}"
            return invalid(Reason.NOT_COMPARABLE, reason, evidence=paths)
    return None


def efficiency(
    name: str,
    one: Sequence[Measurement],
    many: Sequence[Measurement],
    decision: Decision,
    *,
    note: str,
) -> Measurement:
    """E as it was decided from pairs of throughputs, with all their files."""
    return derived(
        many[0],
        name=name,
        value=float(decision.estimate or 0.0),
        unit="",
        n=len(many),
        interval=decision.interval,
        note=note,
        also=[*many, *one],
    )


# -- what the link between the ranks allows --------------------------------------------------------


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
    tokens = float((env.get("effective") or {}).get("tokens_per_step") or 0)
    if tokens < 1:
        raise missing(
            f"{first}: env.json has no tokens_per_step", baseline.launch(first).path("env")
        )
    work_s = tokens / ranks / float(one.value)
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
