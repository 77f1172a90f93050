"""Where nodes exchange gradients too slowly, pairs of them tell which one is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phases.machine.nodes import node_rows, pairs
from runbook.config import registry
from runbook.config.load import load_profile
from runbook.config.phase import PlanContext
from runbook.records import Check, Outcome, Reason
from runbook.records.evidence import Fact, LaunchEvidence, PhaseEvidence
from runbook.records.run import Invocation
from tests.phases import builder, ceiling_files
from tests.phases.answers import MACHINE, UNDECIDED, WARNED, says

FLOOR, FAST, SLOW = 1.0, 2.0, 0.5
PREFLIGHT = registry.phases()["preflight"]
NAMES = ("n0", "n1", "n2", "n3")


def where(nodes: int = 4, *, gated: bool = True) -> PlanContext:
    profile = load_profile("cpu")
    limit = profile.limits["ceiling_all_reduce_gb_s"]
    floor = limit.model_copy(update={"value": FLOOR, "gated": gated})
    limits = {**profile.limits, "ceiling_all_reduce_gb_s": floor}
    return PlanContext(
        profile=profile.model_copy(update={"ranks": nodes, "limits": limits}),
        nodes=nodes,
        invocation=Invocation(profile="cpu", launcher="slurm", nodes=nodes),
    )


def seen(rates: dict[str, float], context: PlanContext, *, ran: bool = True) -> PhaseEvidence:
    """Preflight in which the all-reduce of each launch has a rate; FAST unless given."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        rate = rates.get(made.launch.name, FAST)
        document = ceiling_files.document(made.launch, context.profile, all_reduce=rate)
        return replace(made, ceilings=document)

    measured = ["ceilings", *(f"pair_{a + 1}_{b + 1}" for a, b in pairs(context))]
    found = builder.evidence("preflight", context, change=change, only=measured, conditional=ran)
    return replace(found, facts={**found.facts, **facts(NAMES[: context.nodes])})


def slow_node(rates: dict[str, float], context: PlanContext) -> Check:
    return builder.row("preflight", "slow_node", seen(rates, context), context)


def test_every_node_is_measured_with_the_first_and_one_pair_without_it() -> None:
    planned = [launch for launch in PREFLIGHT.plan(where()) if launch.conditional]
    assert [launch.on for launch in planned] == [(0, 1), (0, 2), (0, 3), (1, 2)]
    for launch in planned:
        assert (launch.nodes, launch.nproc) == (2, 2)
        assert launch.argv[:3] == ("torchrun", "--nnodes=2", "--nproc_per_node=1")


def test_pairs_are_measured_only_where_all_together_fall_short() -> None:
    context = where()
    assert not PREFLIGHT.needs_more(seen({}, context, ran=False), context)
    short = seen({"ceilings": SLOW}, context, ran=False)
    assert PREFLIGHT.needs_more(short, context)
    shown = where(gated=False)
    assert not PREFLIGHT.needs_more(seen({"ceilings": SLOW}, shown, ran=False), shown)


def test_two_nodes_have_one_link_and_no_such_row() -> None:
    assert "preflight.slow_node" not in PREFLIGHT.check_ids(where(2))
    assert not any(launch.conditional for launch in PREFLIGHT.plan(where(2)))


@pytest.mark.parametrize(
    ("slow", "wanted", "words"),
    [
        # Nodes 2 and 3 share the pair without the first node.
        (("pair_1_3", "pair_2_3"), MACHINE, "slow: n2 ("),
        (("pair_1_4",), MACHINE, "slow: n3 ("),
        (("pair_1_2", "pair_1_3", "pair_1_4"), MACHINE, "slow: n0 ("),
        (("pair_1_2", "pair_1_3", "pair_1_4", "pair_2_3"), MACHINE, "no single node: its switch"),
        ((), UNDECIDED, "every pair is fast enough"),
    ],
)
def test_the_slow_node_is_named(
    slow: tuple[str, ...], wanted: tuple[Outcome, Reason], words: str
) -> None:
    check = says(slow_node(dict.fromkeys(("ceilings", *slow), SLOW), where()), wanted, "n0-n1")
    assert check.reason.startswith(words) and "the floor is 1" in check.reason
    assert check.remedy.startswith("take the node")


def test_nodes_that_are_fast_together_need_no_pairs() -> None:
    context = where()
    check = builder.row("preflight", "slow_node", seen({}, context, ran=False), context)
    assert check.outcome is Outcome.PASS


def test_pairs_that_are_missing_are_no_pass() -> None:
    context = where()
    short = seen({"ceilings": SLOW}, context, ran=False)
    check = builder.row("preflight", "slow_node", short, context)
    assert check.outcome is Outcome.INCOMPLETE and "pair_1_2" in check.reason


# Preflight on nodes of a cluster: a node that is absent, or unlike the others, is named.

ON_NODES = PlanContext(
    profile=load_profile("cpu"),
    nodes=2,
    invocation=Invocation(profile="cpu", launcher="slurm", nodes=2),
)
SAME: dict[str, object] = {
    "package.sha256": "ab12", "git.sha": "cd34", "torch.version": "2.13.0", "gpu.count": 0,
    "torch.cuda": None, "torch.nccl": None, "gpu.memory_total_mib": None, "gpu.names": None,
    "gpu.driver": None,
    **dict.fromkeys(("gpu.pcie_gen", "gpu.pcie_width", "gpu.nvlink", "gpu.mig", "gpu.power_limit")),
    "infiniband.present": False, "cpu.count": 2, "disk.write_mib_s": 700.0, "clock.offset_s": 0.0,
}  # fmt: skip


def fact(name: str, value: object, note: str = "") -> Fact:
    return Fact(name=name, value=value, path="host.json", sha256="ab" * 32, note=note)  # type: ignore[arg-type]


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
    assert row(what, facts()).outcome is Outcome.PASS
    unknown = {"nodes.names": fact("nodes.names", None, "job 3 never started")}
    check = row(what, unknown)
    assert check.outcome is Outcome.INCOMPLETE and "job 3 never started" in check.reason


@pytest.mark.parametrize(
    ("what", "changed", "words"),
    [
        ("nodes_alike", {"torch_version_n1": "2.12.0"}, "torch: n1 has 2.12.0, n0 has 2.13.0"),
        ("nodes_alike", {"gpu_count_n0": 1}, "GPUs: n1 has 0, n0 has 1"),
        ("nodes_alike", {"gpu_driver_n1": "550.1"}, "driver: n1 has 550.1, n0 has None"),
        ("nodes_alike", {"package_sha256_n1": "ffff"}, "code of nsa: n1 has ffff, n0 has ab12"),
        ("node_clocks", {"clock_offset_s_n1": 2.5}, "clocks are 2.500 s between n0 and n1 apart"),
    ],
)
def test_a_node_that_differs_is_named(what: str, changed: dict[str, object], words: str) -> None:
    check = says(row(what, facts(**changed)), MACHINE, words)
    assert check.remedy.startswith("take the node that the message names out")
    assert "--launcher slurm --nodes 2" in check.rerun


def test_what_is_wrong_with_nodes_is_said_in_few_words() -> None:
    profile = ON_NODES.profile.model_copy(update={"ranks": 3})
    three = replace(ON_NODES, profile=profile, nodes=3)
    hardware = profile.hardware.model_copy(update={"interconnect": "infiniband"})
    linked = profile.model_copy(update={"ranks": 2, "hardware": hardware})
    needs = replace(ON_NODES, profile=linked)
    odd = facts(("n0", "n1", "n2"), gpu_driver_n2="550.1")
    for what, known, there, reason in (
        ("nodes_alike", odd, three, "driver: n2 has 550.1, the others have None"),
        ("nodes", facts(("n0",)), ON_NODES, "1: n0; asked for were 2"),
        ("interconnect", facts(infiniband_present_n0=True), needs,
         "no InfiniBand on n1; the profile needs it"),
    ):  # fmt: skip
        assert says(row(what, known, there), MACHINE).reason == reason
    says(row("node_clocks", facts(clock_offset_s_n0=0.1)), WARNED)


def test_one_machine_has_none_of_these_rows() -> None:
    preflight = registry.phases()["preflight"]
    alone = preflight.check_ids(PlanContext(profile=load_profile("cpu")))
    assert set(preflight.check_ids(ON_NODES)) - set(alone) == {
        f"preflight.{one.what}" for one in node_rows()
    }
