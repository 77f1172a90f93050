"""Some of a run's ranks that train alone, each with the batch that it has in the whole run.

One rank, and where a run is spread over several nodes all ranks of the first 1, 2, 4, ... of them:
what is lost between two numbers of ranks is the cost of working together (weak scaling).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile

from nsa.toggles import TOGGLES
from phases.kit.case import Case, Finding, invalid, once
from phases.kit.commands import repeated
from phases.training.plausible import differences
from runbook.config.phase import PlanContext
from runbook.records import Launch, Reason

# What may differ between numbers of ranks: their number, and DDP itself.
RANKS = (
    "world_size",
    "effective.world_size",
    "versions.nccl",
    *(f"toggles.{name}" for name in TOGGLES if name.startswith("NSA_DDP_")),
)
_BATCH = "train.batch_size"
# At one batch per rank also the global one, and what follows from it.
_GROWN = (
    *RANKS,
    "effective.global_batch",
    "effective.tokens_per_step",
    f"config.{_BATCH}",
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
    return [
        launch.model_copy(update={"config_overrides": {**launch.config_overrides, _BATCH: batch}})
        for launch in planned
    ]


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
