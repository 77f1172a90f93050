"""Rows about the GPUs that a launch can see: can torch use them, are they those of the profile?"""

from __future__ import annotations

import re

from phases.kit import MEMORY_SHARE, POWER_LEAST
from phases.kit.case import Case
from phases.kit.finding import Finding, invalid, passed, skipped, warned
from runbook.records import Measurement, Reason
from runbook.records.measurement import MIB_PER_GIB

# The oldest Linux driver for programs of a CUDA generation: NVIDIA, "CUDA Toolkit Release Notes",
# tables of driver versions and of minor version compatibility; the first driver of each branch.
_OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


def require_gpu(case: Case, verb: str = "uses") -> None:
    """Raise that it is SKIPPED on a profile without GPUs."""
    if not case.profile.has_gpu:
        reason = f"profile {case.profile.name} {verb} no GPU"
        raise skipped(Reason.NEEDS_CUDA, reason)


def cuda(case: Case) -> Finding:
    """Can torch use as many devices as the profile trains on?"""
    require_gpu(case)
    value = case.known("torch.cuda_available")
    if value.value is not True:
        why = _why_none(case)
        return invalid(
            Reason.WRONG_ENVIRONMENT,
            f"torch sees no CUDA device: {why}",
            measurement=value,
            title=f"No GPU that torch can use: profile {case.profile.name} trains on GPUs.",
            clue=f"This profile trains on GPUs, and {why}.",
        )
    count = case.known("torch.device_count")
    wanted, seen = case.profile.hardware.gpus, float(count.value)
    if seen < wanted:
        return _wrong_hardware(f"torch sees {seen:.0f} device(s), the profile uses {wanted}", count)
    return passed(f"torch sees {seen:.0f} device(s)", measurement=count)


def _why_none(case: Case) -> str:
    """The first cause that the facts show."""
    facts = case.evidence.facts
    built, version, count, installed = (
        facts.get(name) for name in ("torch.cuda", "torch.version", "gpu.count", "gpu.installed")
    )
    if built is not None and built.value is None:
        return f"torch {version.value if version else ''} was built without CUDA"
    if count is None or count.value is None:
        return count.note if count else "nvidia-smi was not asked"
    if not count.value:
        hidden = bool(installed and installed.value)
        return f"all GPUs are hidden ({count.note})" if hidden else "nvidia-smi lists no GPU"
    old = _too_old(case)
    return old or "driver and visible devices look right; see collect_env.txt"


def driver(case: Case) -> Finding:
    """Is the driver new enough for the CUDA that torch was built for?

    A data center's driver may run a newer CUDA through its compatibility package, so an old one is
    a warning where torch sees the GPUs all the same.
    """
    require_gpu(case)
    value = case.known("gpu.driver")
    old = _too_old(case)
    if not old:
        built = case.fact("torch.cuda")
        suits = f"; torch was built for CUDA {built.value}" if built.value else f"; {built.note}"
        return passed(f"{value.value}{suits}", measurement=value)
    available = case.evidence.facts.get("torch.cuda_available")
    if available is not None and available.value is True:
        return warned(f"{old}; torch sees the GPUs all the same", measurement=value)
    return _wrong_hardware(old, value)


def _too_old(case: Case) -> str:
    """Why torch's CUDA cannot run on this driver, or an empty string."""
    facts = case.evidence.facts
    here, built = facts.get("gpu.driver"), facts.get("torch.cuda")
    if not here or not here.value or not built or not built.value:
        return ""
    generation = _numbers(str(built.value))[0]
    wanted = _OLDEST_DRIVER.get(generation)
    if wanted is None or _numbers(str(here.value)) >= _numbers(wanted):
        return ""
    return f"driver {here.value}, but CUDA {built.value} of this torch needs {wanted} or newer"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)) or (0,)


def mig(case: Case) -> Finding:
    """Is no visible GPU cut into instances?"""
    require_gpu(case)
    value = case.known("gpu.mig")
    if value.value:
        reason = f"MIG is on ({value.note}): an instance is a part of a GPU, the profile is for all"
        return _wrong_hardware(reason, value)
    return passed("MIG is off", measurement=value)


def extra_gpus(case: Case) -> Finding:
    """A warning where more GPUs are visible than the profile uses."""
    require_gpu(case)
    count = case.known("gpu.count")
    wanted, seen = case.profile.hardware.gpus, float(count.value)
    if seen > wanted:
        text = f"{seen:.0f} GPUs are visible, {wanted} will be used: rows about GPUs judge them all"
        return warned(text, measurement=count)
    return passed(f"{seen:.0f} visible, {wanted} used", measurement=count)


def _wrong_hardware(reason: str, value: Measurement) -> Finding:
    return invalid(Reason.WRONG_ENVIRONMENT, reason, measurement=value)


def gpu_names(case: Case) -> Finding:
    """Number and names of the GPUs."""
    hardware = case.profile.hardware
    if not case.profile.has_gpu:
        fact = case.fact("gpu.count")
        return skipped(
            Reason.NEEDS_CUDA, f"{fact.value or 0} GPU(s) here; this profile runs on the CPU"
        )
    count = case.known("gpu.count")
    names = case.known("gpu.names")
    if float(count.value) < hardware.gpus:
        why = f" ({count.note})" if count.note else ""
        reason = f"{float(count.value):.0f} GPU(s){why}, the profile needs {hardware.gpus}"
        return _wrong_hardware(reason, count)
    wanted = hardware.gpu_name
    others = [name for name in str(names.value).split(", ") if wanted and wanted not in name]
    if others:
        return _wrong_hardware(f"{', '.join(others)}; the profile is for {wanted}", names)
    return passed(f"{float(count.value):.0f} x {names.value}", measurement=names)


def gpu_memory(case: Case) -> Finding:
    """Memory of the smallest GPU against the profile's."""
    wanted = case.profile.hardware.gpu_memory_gib
    require_gpu(case)
    if wanted is None:
        return skipped(Reason.NOT_ASKED_FOR, "the profile does not specify GPU memory")
    value = case.known("gpu.memory_total_mib")
    here = float(value.value) / MIB_PER_GIB
    if here < MEMORY_SHARE * wanted:
        return _wrong_hardware(f"{here:.0f} GiB, the profile needs {wanted:g}", value)
    return passed(f"{here:.0f} GiB", measurement=value)


def pcie(case: Case) -> Finding:
    """Generation that the link can reach (an idle one trains down), and its width."""
    hardware = case.profile.hardware
    require_gpu(case)
    if hardware.pcie_gen is None:
        return skipped(Reason.NOT_ASKED_FOR, "the profile does not specify a PCIe link")
    best = case.known("gpu.pcie_gen_max")
    if float(best.value) != hardware.pcie_gen:
        reason = f"PCIe generation {float(best.value):g}, the profile is for {hardware.pcie_gen}"
        return _wrong_hardware(reason, best)
    width = case.known("gpu.pcie_width")
    if hardware.pcie_width is not None and float(width.value) < hardware.pcie_width:
        reason = f"x{float(width.value):g} link, the profile is for x{hardware.pcie_width}"
        return _wrong_hardware(reason, width)
    return passed(f"generation {float(best.value):g}, x{float(width.value):g}", measurement=best)


def nvlink(case: Case) -> Finding:
    """NVLink changes what the throughput means, in either direction."""
    wanted = case.profile.hardware.nvlink
    require_gpu(case)
    if wanted is None:
        return skipped(Reason.NOT_ASKED_FOR, "the profile does not specify NVLink")
    value = case.known("gpu.nvlink")
    text = f"{'NVLink' if value.value else 'no NVLink'}{f' ({value.note})' if value.note else ''}"
    if value.value is not wanted:
        expected = "NVLink" if wanted else "PCIe only"
        return _wrong_hardware(f"{text}; the profile is for {expected}", value)
    return passed(text, measurement=value)


def gpu_state(case: Case) -> Finding:
    """Nobody else on the GPUs, their memory empty, nothing broken or throttled."""
    require_gpu(case)
    busy = case.known("gpu.processes")
    if float(busy.value) > 0:
        return _wrong_hardware(f"{float(busy.value):.0f} process(es): {busy.note}", busy)
    used = case.known("gpu.memory_used_mib")
    limit = case.limit("gpu_idle_memory_mib")
    if limit.gated and not limit.holds(float(used.value)):
        return _wrong_hardware(f"{float(used.value):.0f} MiB in use before the run", used)
    broken = _broken(case)
    if broken:
        return _wrong_hardware(broken, busy)
    caps = case.evidence.facts.get("gpu.caps")
    capped = f"; clocks limited by design: {caps.value}" if caps and caps.value else ""
    return passed(f"no process, {float(used.value):.0f} MiB in use{capped}", measurement=busy)


def power_limit(case: Case) -> Finding:
    """INVALID where somebody set the power limit of a GPU under the one that it is sold with."""
    require_gpu(case)
    fact = case.fact("gpu.power_limit")
    if fact.value is None:
        return warned(f"power limits are unknown: {fact.note}", evidence=(fact.path,))
    value = case.known("gpu.power_limit")
    if float(value.value) < POWER_LEAST:
        return _wrong_hardware(f"{value.note}: held down to {float(value.value):.0%}", value)
    return passed(value.note, measurement=value)


def _broken(case: Case) -> str:
    """What the card itself reports; facts that it does not report say nothing."""
    problems = []
    facts = case.evidence.facts
    ecc, remap, failure, throttle = (
        facts.get(f"gpu.{name}")
        for name in ("ecc_uncorrected", "remap_pending", "remap_failure", "throttle")
    )
    if ecc and isinstance(ecc.value, (int, float)) and ecc.value > 0:
        problems.append(f"{ecc.value:g} uncorrected memory error(s)")
    if remap and remap.value is True:
        problems.append("a row remap is pending: reset the GPU")
    if failure and failure.value is True:
        problems.append("a row could not be remapped: replace the GPU")
    if throttle and throttle.value:
        problems.append(f"throttled: {throttle.value}")
    return "; ".join(problems)
