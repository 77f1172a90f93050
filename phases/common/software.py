"""Did a launch run on the software that preflight found?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phases.common.case import Case
from runbook.records.evidence import LaunchEvidence

# Versions of env.json, and the facts of preflight that tell the same.
_SAME = {
    "torch": "torch.version",
    "cuda": "torch.cuda",
    "nccl": "torch.nccl",
    "driver": "gpu.driver",
}
# A container may hide the file from which a process reads it; nvidia-smi and NVML tell it.
_MAY_BE_HIDDEN = "driver"


def other_software(case: Case, launch: LaunchEvidence, env: Mapping[str, Any]) -> list[str]:
    """`torch: preflight saw 2.13.0, it ran on 2.9.0` for each version that is another.

    Nothing where preflight is not part of the run. On a profile with GPUs a version that env.json
    does not tell counts as another.
    """
    versions = env.get("versions") or {}
    problems = []
    for name, fact in _SAME.items():
        found = case.evidence.facts.get(fact)
        if found is None or found.value is None:
            continue
        told = versions.get(name)
        if told is None and (name == _MAY_BE_HIDDEN or not case.profile.has_gpu):
            continue
        if told != found.value:
            problems.append(f"{name}: preflight saw {found.value}, it ran on {told}")
    problems += _other_package(case, launch, env)
    seen, asked = case.evidence.facts.get(_SAME["driver"]), launch.devices_before or {}
    counted = asked.get("driver") if asked.get("source") else None
    if seen is not None and None not in (seen.value, counted) and counted != seen.value:
        problems.append(f"driver: preflight saw {seen.value}, the launch began with {counted}")
    return problems


def _other_package(case: Case, launch: LaunchEvidence, env: Mapping[str, Any]) -> list[str]:
    """The package under test is not the one that the run began with, or that preflight saw.

    A commit's launch has its own.
    """
    package, began = env.get("package") or {}, case.context.package
    problems = []
    ran = str(package.get("sha256") or "")[: len(began)]
    if ran and ran != began and not launch.launch.commit:
        problems.append(f"package.sha256: {began} as the run began, it ran {ran}: code was changed")
    for what, name in (("path", "package.path"), ("sha256", "package.sha256")):
        found, told = case.evidence.facts.get(name), package.get(what)
        if launch.launch.commit or found is None or None in (found.value, told):
            continue
        if told != found.value:
            problems.append(f"{name}: preflight saw {found.value}, it ran {told}")
    return problems
