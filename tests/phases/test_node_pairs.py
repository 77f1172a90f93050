"""Preflight on nodes: one that is absent, unlike the others, or slow to exchange is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phases.machine.nodes import node_rows, pairs
from runbook.config.phase import PlanContext
from runbook.records import Check, Outcome, Reason
from runbook.records.evidence import Fact, LaunchEvidence, PhaseEvidence
from tests.phases import builder, machine_files
from tests.phases.answers import FINE, MACHINE, NOT_RUN, NOTHING, UNDECIDED, WARNED, says

FLOOR, FAST, SLOW = 1.0, 2.0, 0.5
PREFLIGHT = builder.PHASES["preflight"]
NAMES = ("n0", "n1", "n2", "n3")


def where(nodes: int = 4, *, gated: bool = True) -> PlanContext:
    base = builder.on_nodes(nodes, "cpu")
    limits = dict(base.profile.limits)
    floor = limits["ceiling_all_reduce_gb_s"].model_copy(update={"value": FLOOR, "gated": gated})
    limits["ceiling_all_reduce_gb_s"] = floor
    return replace(base, profile=base.profile.model_copy(update={"limits": limits}))


def seen(rates: dict[str, float], context: PlanContext, *, ran: bool = True) -> PhaseEvidence:
    """Preflight in which the all-reduce of each launch has a rate; FAST unless given."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        rate = rates.get(made.launch.name, FAST)
        document = machine_files.document(made.launch, context.profile, all_reduce=rate)
        return replace(made, ceilings=document)

    measured = ["ceilings", *(f"pair_{a + 1}_{b + 1}" for a, b in pairs(context))]
    found = builder.evidence("preflight", context, change=change, only=measured, conditional=ran)
    return replace(found, facts={**found.facts, **facts(NAMES[: context.nodes])})


def test_every_node_is_measured_with_the_first_and_one_pair_without_it() -> None:
    planned = [launch for launch in PREFLIGHT.plan(where()) if launch.conditional]
    assert [launch.on for launch in planned] == [(0, 1), (0, 2), (0, 3), (1, 2)]
    for launch in planned:
        assert (launch.nodes, launch.nproc) == (2, 2)
        assert launch.argv[:3] == ("torchrun", "--nnodes=2", "--nproc_per_node=1")
    # Two nodes have one link, and no such row.
    assert "preflight.slow_node" not in PREFLIGHT.check_ids(where(2))
    assert not any(launch.conditional for launch in PREFLIGHT.plan(where(2)))


@pytest.mark.parametrize(
    ("rates", "gated", "more"), [({}, True, False), ({"ceilings": SLOW}, True, True),
                                 ({"ceilings": SLOW}, False, False)],
)  # fmt: skip
def test_pairs_are_measured_only_where_all_together_fall_short(
    rates: dict[str, float], gated: bool, more: bool
) -> None:
    context = where(gated=gated)
    assert PREFLIGHT.needs_more(seen(rates, context, ran=False), context) is more


@pytest.mark.parametrize(
    ("slow", "ran", "wanted", "words"),
    [
        # Nodes 2 and 3 share the pair without the first node.
        (("pair_1_3", "pair_2_3"), True, MACHINE, "slow: n2 ("),
        (("pair_1_4",), True, MACHINE, "slow: n3 ("),
        (("pair_1_2", "pair_1_3", "pair_1_4"), True, MACHINE, "slow: n0 ("),
        (("pair_1_2", "pair_1_3", "pair_1_4", "pair_2_3"), True, MACHINE,
         "no single node: its switch"),
        ((), True, UNDECIDED, "every pair is fast enough"),
        # Pairs that are missing are no pass; nodes that are fast together need none.
        ((), False, NOT_RUN, "pair_1_2"),
        (None, False, FINE, ""),
    ],
)  # fmt: skip
def test_the_slow_node_is_named(
    slow: tuple[str, ...] | None, ran: bool, wanted: tuple[Outcome, Reason], words: str
) -> None:
    rates = {} if slow is None else dict.fromkeys(("ceilings", *slow), SLOW)
    found = seen(rates, where(), ran=ran)
    check = says(builder.row("preflight", "slow_node", found, where()), wanted, words)
    if ran:
        assert check.reason.startswith(words) and "the floor is 1" in check.reason
        assert "n0-n1" in check.reason and check.remedy.startswith("take the node")


ON_NODES = builder.on_nodes(2, "cpu")
SAME: dict[str, object] = {
    "package.sha256": "ab12", "git.sha": "cd34", "torch.version": "2.13.0", "gpu.count": 0,
    "torch.cuda": None, "torch.nccl": None, "gpu.memory_total_mib": None, "gpu.names": None,
    "gpu.driver": None,
    **dict.fromkeys(("gpu.pcie_gen", "gpu.pcie_width", "gpu.nvlink", "gpu.mig", "gpu.power_limit")),
    "infiniband.present": False, "cpu.count": 2, "disk.write_mib_s": 700.0, "clock.offset_s": 0.0,
}  # fmt: skip


def fact(name: str, value: Any, note: str = "") -> Fact:
    return Fact(name=name, value=value, path="host.json", sha256="ab" * 32, note=note)


def facts(nodes: tuple[str, ...] = ("n0", "n1"), **changed: object) -> dict[str, Fact]:
    """Those of equal nodes; `changed` has values by fact and node, with `_` for the dot and `@`."""
    found = {"nodes.names": fact("nodes.names", ", ".join(nodes))}
    for node in nodes:
        for name, value in SAME.items():
            key = f"{name.replace('.', '_')}_{node}"
            own = f"{name}@{node}"
            found[own] = fact(own, changed.get(key, value), note="" if value else "none here")
    return found


def row(what: str, known: dict[str, Fact], where: PlanContext = ON_NODES) -> Check:
    evidence = builder.evidence("preflight", where)
    evidence = replace(evidence, facts={**evidence.facts, **known})
    return builder.row("preflight", what, evidence, where)


@pytest.mark.parametrize("what", [one.what for one in node_rows()])
def test_equal_nodes_pass_and_none_at_all_do_not(what: str) -> None:
    says(row(what, facts()), FINE)
    unknown = {"nodes.names": fact("nodes.names", None, "job 3 never started")}
    says(row(what, unknown), NOTHING, "job 3 never started")


HARDWARE = ON_NODES.profile.hardware.model_copy(update={"interconnect": "infiniband"})
LINKED = replace(ON_NODES, profile=ON_NODES.profile.model_copy(update={"hardware": HARDWARE}))
THREE = facts(("n0", "n1", "n2"), gpu_driver_n2="550.1")


@pytest.mark.parametrize(
    ("what", "known", "on", "wanted", "words"),
    [
        ("nodes_alike", facts(torch_version_n1="2.12.0"), ON_NODES, MACHINE,
         "torch: n1 has 2.12.0, n0 has 2.13.0"),
        ("nodes_alike", facts(gpu_count_n0=1), ON_NODES, MACHINE, "GPUs: n1 has 0, n0 has 1"),
        ("nodes_alike", facts(gpu_driver_n1="550.1"), ON_NODES, MACHINE,
         "driver: n1 has 550.1, n0 has None"),
        ("nodes_alike", facts(package_sha256_n1="ffff"), ON_NODES, MACHINE,
         "code of nsa: n1 has ffff, n0 has ab12"),
        ("nodes_alike", THREE, builder.on_nodes(3, "cpu"), MACHINE,
         "driver: n2 has 550.1, the others have None"),
        ("nodes", facts(("n0",)), ON_NODES, MACHINE, "1: n0; asked for were 2"),
        ("interconnect", facts(infiniband_present_n0=True), LINKED, MACHINE,
         "no InfiniBand on n1; the profile needs it"),
        ("node_clocks", facts(clock_offset_s_n1=2.5), ON_NODES, MACHINE,
         "clocks are 2.500 s between n0 and n1 apart"),
        ("node_clocks", facts(clock_offset_s_n0=0.1), ON_NODES, WARNED, ""),
    ],
)  # fmt: skip
def test_a_node_that_differs_is_named(
    what: str, known: dict[str, Fact], on: PlanContext, wanted: Any, words: str
) -> None:
    check = says(row(what, known, on), wanted, words)
    if wanted is MACHINE:
        assert check.remedy.startswith("take the node that the message names out")
        assert f"--launcher slurm --nodes {on.nodes}" in check.rerun


def test_one_machine_has_none_of_these_rows() -> None:
    alone = PREFLIGHT.check_ids(builder.context("cpu"))
    more = set(PREFLIGHT.check_ids(ON_NODES)) - set(alone)
    assert more == {f"preflight.{one.what}" for one in node_rows()}
