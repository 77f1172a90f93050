"""A launch on another torch, CUDA, NCCL or driver than preflight found is not the one planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runbook.records import Outcome
from tests.phases import builder, env_files, spoil
from tests.phases.answers import FINE, OTHERWISE, WHERE, says
from tests.phases.spoil import Change, at

CPU = builder.context("cpu")


def planned(
    change: Change | None, phase: str = "baseline", where: Any = WHERE, **facts: Any
) -> Any:
    """Row `as_planned` in a run with preflight, in which the last launch is changed."""
    name = builder.PHASES[phase].plan(where)[-1].name
    found = builder.evidence(phase, where, change=change, only=[name])
    known = {one: value for one, value in facts.items() if "." not in one}
    seen = builder.facts(**known)
    seen |= {n: replace(seen["git.sha"], name=n, value=v) for n, v in facts.items() if "." in n}
    return builder.row(phase, "as_planned", replace(found, facts=seen), where)


def ran_on(**versions: Any) -> Change:
    return spoil.env(versions=versions)


@pytest.mark.parametrize("phase", builder.TRAINING)
def test_another_version_in_any_phase_is_named_and_decides(phase: str) -> None:
    assert planned(None, phase).outcome is Outcome.PASS
    check = planned(ran_on(torch="2.9.1"), phase)
    says(check, OTHERWISE, "torch: preflight saw 2.13.0, it ran on 2.9.1")
    assert check.required


BARE = {"where": CPU, **dict.fromkeys(("torch_cuda", "torch_nccl", "gpu_driver"))}


@pytest.mark.parametrize(
    ("change", "wanted", "text", "options"),
    [
        (ran_on(cuda="12.8"), OTHERWISE, "cuda: preflight saw 13.0, it ran on 12.8", {}),
        (ran_on(nccl="2.21.5"), OTHERWISE, "nccl: preflight saw 2.27.7, it ran on 2.21.5", {}),
        (ran_on(driver="550"), OTHERWISE, "driver: preflight saw 580.95.05, it ran on 550", {}),
        (ran_on(torch=None), OTHERWISE, "torch: preflight saw 2.13.0, it ran on None", {}),
        (ran_on(nccl=None), OTHERWISE, "nccl: preflight saw 2.27.7, it ran on None", {}),
        (at("devices_before", driver="550.54"), OTHERWISE,
         "driver: preflight saw 580.95.05, the launch began with 550.54", {}),
        # A container may hide the driver's file; on a CPU a trainer need not tell.
        (ran_on(driver=None), FINE, "", {}),
        (ran_on(torch=None), FINE, "", BARE),
        (ran_on(torch="2.9.1"), OTHERWISE, "", BARE),
    ],
)  # fmt: skip
def test_each_version_has_its_second_source(
    change: Change, wanted: Any, text: str, options: dict[str, Any]
) -> None:
    says(planned(change, **options), wanted, text)


PACKAGE = env_files.package(builder.PHASES["baseline"].plan(WHERE)[0])
ITS = {f"package.{name}": text for name, text in PACKAGE.items()}
OURS = replace(WHERE, package="0" * 12, package_path="/ours/nsa")
PATHS, LEAVE = "PYTHONPATH", "leave the code as it is while a run goes on"


@pytest.mark.parametrize(
    ("where", "facts", "remedy", "text", "not_in"),
    [
        # A folder `nsa` where the run was started, or on PYTHONPATH, comes before ours.
        (WHERE, {**ITS, "package.path": "/elsewhere/nsa"}, PATHS,
         f"two folders: the harness has /elsewhere/nsa, the launch ran {PACKAGE['path']}", "x x"),
        (WHERE, {**ITS, "package.sha256": "e" * 64}, "",
         f"package.sha256: preflight saw {'e' * 64}, it ran ", PATHS),
        # Without preflight: nobody changed code, and the remedy says what to unset.
        (OURS, {}, PATHS, f"the harness has /ours/nsa, the launch ran {PACKAGE['path']}",
         "code was changed"),
        (replace(OURS, package_path=PACKAGE["path"]), {}, LEAVE, "code was changed", PATHS),
    ],
)  # fmt: skip
def test_another_package_than_the_harness_saw_is_named_and_decides(
    where: Any, facts: dict[str, str], remedy: str, text: str, not_in: str
) -> None:
    check = says(planned(None, where=where, **facts), OTHERWISE, text, remedy=remedy)
    assert not_in not in check.reason + check.remedy


def test_the_same_package_from_another_folder_is_the_one_planned() -> None:
    where = replace(OURS, package=PACKAGE["sha256"][:12])
    assert planned(None, where=where).outcome is Outcome.PASS
