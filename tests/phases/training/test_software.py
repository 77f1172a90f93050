"""A launch on another torch, CUDA, NCCL or driver than preflight found is not the one planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runbook.records import Check, Outcome, Reason
from tests.phases import builder, spoil
from tests.phases.answers import OTHERWISE, says

WHERE = builder.context()


def ran_on(**versions: Any) -> spoil.Change:
    """env.json tells these versions."""
    return spoil.env(versions=versions)


def planned(
    change: spoil.Change | None, phase: str = "baseline", where: Any = WHERE, **facts: Any
) -> Check:
    """Row `as_planned` in a run with preflight, in which the last launch is changed."""
    name = builder.PHASES[phase].plan(where)[-1].name
    found = builder.evidence(phase, where, change=change, only=[name])
    seen = builder.facts(**facts)
    return builder.row(phase, "as_planned", replace(found, facts=seen), where)


@pytest.mark.parametrize("phase", builder.TRAINING)
def test_another_version_in_any_phase_is_named_and_decides(phase: str) -> None:
    assert planned(None, phase).outcome is Outcome.PASS
    check = planned(ran_on(torch="2.9.1"), phase)
    says(check, OTHERWISE, "torch: preflight saw 2.13.0, it ran on 2.9.1")
    assert check.required


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (ran_on(cuda="12.8"), "cuda: preflight saw 13.0, it ran on 12.8"),
        (ran_on(nccl="2.21.5"), "nccl: preflight saw 2.27.7, it ran on 2.21.5"),
        (ran_on(driver="550"), "driver: preflight saw 580.95.05, it ran on 550"),
        (ran_on(torch=None), "torch: preflight saw 2.13.0, it ran on None"),
        (ran_on(nccl=None), "nccl: preflight saw 2.27.7, it ran on None"),
        (
            lambda made: replace(
                made, devices_before={**(made.devices_before or {}), "driver": "550.54"}
            ),
            "driver: preflight saw 580.95.05, the launch began with 550.54",
        ),
    ],
)
def test_each_version_has_its_second_source(change: spoil.Change, text: str) -> None:
    check = planned(change)
    assert check.outcome is Outcome.INVALID and text in check.reason


def test_a_container_may_hide_the_drivers_file() -> None:
    assert planned(ran_on(driver=None)).outcome is Outcome.PASS


def test_on_a_cpu_a_trainer_need_not_tell_but_must_not_differ() -> None:
    where = builder.context("cpu")
    none = dict.fromkeys(("torch_cuda", "torch_nccl", "gpu_driver"))
    assert planned(ran_on(torch=None), where=where, **none).outcome is Outcome.PASS
    assert planned(ran_on(torch="2.9.1"), where=where, **none).outcome is Outcome.INVALID


def test_another_package_than_preflight_saw_is_named_and_decides() -> None:
    """A folder `nsa` where the run was started, or on PYTHONPATH, comes before ours."""
    found = builder.evidence("baseline", WHERE)
    launch = next(iter(found.launches.values()))
    package = (launch.env or {})["package"]
    for what, value in (("path", "/elsewhere/nsa"), ("sha256", "e" * 64)):
        facts = {f"package.{name}": text for name, text in package.items()}
        seen = builder.facts()
        seen |= {
            name: replace(seen["git.sha"], name=name, value=text)
            for name, text in (facts | {f"package.{what}": value}).items()
        }
        check = builder.row("baseline", "as_planned", replace(found, facts=seen), WHERE)
        assert (check.outcome, check.code) == (Outcome.INVALID, Reason.MISMATCH)
        told = {
            "path": f"two folders: the harness has {value}, the launch ran {package['path']}",
            "sha256": f"package.sha256: preflight saw {value}, it ran ",
        }
        assert told[what] in check.reason
        assert ("PYTHONPATH" in check.remedy) is (what == "path")


def test_without_preflight_another_digest_from_another_folder_is_told_as_two_folders() -> None:
    """PYTHONPATH named another checkout: nobody changed code, and the remedy says what to unset."""
    found = builder.evidence("baseline", WHERE)
    package = (next(iter(found.launches.values())).env or {})["package"]
    where = replace(WHERE, package="0" * 12, package_path="/ours/nsa")
    check = says(builder.row("baseline", "as_planned", found, where), OTHERWISE)
    folders = f"the harness has /ours/nsa, the launch ran {package['path']}"
    assert folders in check.reason and "code was changed" not in check.reason
    assert "PYTHONPATH" in check.remedy
    same = replace(where, package_path=package["path"])
    check = builder.row("baseline", "as_planned", found, same)
    assert "code was changed" in check.reason and "PYTHONPATH" not in check.remedy
    assert "leave the code as it is while a run goes on" in check.remedy
    alike = replace(where, package=package["sha256"][:12])
    assert builder.row("baseline", "as_planned", found, alike).outcome is Outcome.PASS
