"""Preflight on nodes of a cluster: a node that is absent, or unlike the others, is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phases.machine.nodes import node_rows
from runbook import registry
from runbook.config.load import load_profile
from runbook.records import Check, Outcome, Reason
from runbook.records.evidence import Fact
from runbook.records.phase import PlanContext
from runbook.records.run import Invocation
from tests.phases import builder
from tests.phases.answers import said

WRONG = (Outcome.INVALID, Reason.WRONG_ENVIRONMENT)
ON_NODES = PlanContext(
    profile=load_profile("cpu"),
    nodes=2,
    invocation=Invocation(profile="cpu", launcher="slurm", nodes=2),
)
SAME = {
    "package.sha256": "ab12",
    "git.sha": "cd34",
    "torch.version": "2.13.0",
    "torch.cuda": None,
    "torch.nccl": None,
    "gpu.count": 0,
    "gpu.names": None,
    "gpu.driver": None,
    "gpu.memory_total_mib": None,
    "gpu.pcie_gen": None,
    "gpu.pcie_width": None,
    "gpu.nvlink": None,
    "gpu.mig": None,
    "gpu.power_limit": None,
    "infiniband.present": False,
    "cpu.count": 2,
    "disk.write_mib_s": 700.0,
    "clock.offset_s": 0.0,
}


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
    check = row(what, facts(**changed))
    assert said(check) == WRONG and words in check.reason, check.reason
    assert check.remedy.startswith("take the node that the message names out")
    assert "--launcher slurm --nodes 2" in check.rerun


def test_of_three_nodes_the_odd_one_is_named() -> None:
    profile = ON_NODES.profile.model_copy(update={"ranks": 3})
    three = replace(ON_NODES, profile=profile, nodes=3)
    known = facts(("n0", "n1", "n2"), gpu_driver_n2="550.1")
    check = row("nodes_alike", known, three)
    assert said(check) == WRONG
    assert check.reason == "driver: n2 has 550.1, the others have None"


def test_fewer_nodes_than_asked_for_are_invalid() -> None:
    check = row("nodes", facts(("n0",)))
    assert said(check) == WRONG and check.reason == "1: n0; asked for were 2"


def test_clocks_that_are_a_little_apart_are_a_warning() -> None:
    check = row("node_clocks", facts(clock_offset_s_n0=0.1))
    assert said(check) == (Outcome.PASS, Reason.WARNING)


def test_an_interconnect_that_the_profile_needs_is_missed_by_name() -> None:
    profile = load_profile("cpu")
    hardware = profile.hardware.model_copy(update={"interconnect": "infiniband"})
    needs = replace(ON_NODES, profile=profile.model_copy(update={"hardware": hardware}))
    check = row("interconnect", facts(infiniband_present_n0=True), needs)
    assert said(check) == WRONG
    assert check.reason == "no InfiniBand on n1; the profile needs it"


def test_one_machine_has_none_of_these_rows() -> None:
    preflight = registry.phases()["preflight"]
    alone = preflight.check_ids(PlanContext(profile=load_profile("cpu")))
    assert set(preflight.check_ids(ON_NODES)) - set(alone) == {
        f"preflight.{one.what}" for one in node_rows()
    }
