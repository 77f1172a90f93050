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


def other_folder(case: Case, launch: LaunchEvidence, env: Mapping[str, Any]) -> str:
    """That launch and harness loaded the package under test from two folders; empty if not.

    Without preflight only another digest shows it: the same files may lie in two places. A
    commit's launch has its own folder.
    """
    package = env.get("package") or {}
    ours, theirs = case.context.package_path, str(package.get("path") or "")
    seen = case.evidence.facts.get("package.path")
    if seen is not None and seen.value is not None:
        ours = str(seen.value)
    elif not _other_digest(case, package):
        return ""
    if launch.launch.commit or not (ours and theirs) or ours == theirs:
        return ""
    return f"nsa was loaded from two folders: the harness has {ours}, the launch ran {theirs}"


def _other_digest(case: Case, package: Mapping[str, Any]) -> str:
    """The digest of the package that ran where the run began with another one, as long as that."""
    began = case.context.package
    ran = str(package.get("sha256") or "")[: len(began)]
    return ran if ran != began else ""


def _other_package(case: Case, launch: LaunchEvidence, env: Mapping[str, Any]) -> list[str]:
    """The package under test is not the one that the run began with, or that preflight saw.

    A commit's launch has its own.
    """
    package = env.get("package") or {}
    if launch.launch.commit:
        return []
    if folders := other_folder(case, launch, env):
        return [folders]
    problems = []
    if ran := _other_digest(case, package):
        began = case.context.package
        problems.append(f"package.sha256: {began} as the run began, it ran {ran}: code was changed")
    found, told = case.evidence.facts.get("package.sha256"), package.get("sha256")
    if found is not None and None not in (found.value, told) and told != found.value:
        problems.append(f"package.sha256: preflight saw {found.value}, it ran {told}")
    return problems
