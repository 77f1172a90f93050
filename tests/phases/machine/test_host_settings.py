"""Row `preflight.host_settings`: each setting that skews numbers is named; none decides."""

from __future__ import annotations

from typing import Any

import pytest

from runbook.records import Check, Outcome
from runbook.records.evidence import Fact, PhaseEvidence
from tests.phases import builder
from tests.phases.answers import FINE, NOTHING, WARNED, says

SKEWS: dict[str, tuple[Any, str]] = {
    "shm_gib": (0.0625, "--shm-size"),
    "shm_free_gib": (0.01, "nearly full"),
    "load_per_cpu": (0.9, "loaded"),
    "busy_cpus": (3.5, "keep CPUs busy"),
}


def judged(profile: str = "a100x2_pcie4", **changes: Any) -> Check:
    where = builder.context(profile)
    found = PhaseEvidence(facts=builder.facts(**changes))
    return builder.row("preflight", "host_settings", found, where)


def test_a_host_without_anything_to_say_passes() -> None:
    check = says(judged(), FINE)
    assert check.reason == "4 settings read, none skews numbers" and not check.required


@pytest.mark.parametrize("name", SKEWS)
def test_a_setting_that_skews_numbers_is_a_warning_with_its_remedy(name: str) -> None:
    value, said = SKEWS[name]
    check = says(judged(**{f"host_{name}": value}), WARNED, said)
    assert check.remedy


@pytest.mark.parametrize("name", SKEWS)
def test_what_cannot_be_read_is_said(name: str) -> None:
    says(judged(**{f"host_{name}": None}), FINE, f"unreadable: {name} (as seen)", "3 settings")


def test_facts_of_another_shape_and_none_at_all() -> None:
    odd = builder.facts() | {"host.busy_cpus": Fact(name="x", value="?", path="p", sha256="s")}
    where = builder.context()
    check = builder.row("preflight", "host_settings", PhaseEvidence(facts=odd), where)
    assert check.outcome is Outcome.PASS
    says(builder.row("preflight", "host_settings", PhaseEvidence(), where), NOTHING)
