"""Row `host_settings`: what on this host skews numbers, named with its remedy; it never decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phases.kit.case import Case, Finding, missing, passed, skipped, warned
from phases.kit.limits import BUSY_SHARE, OTHER_WORK_SHARE, SHM_LEAST_GIB
from phases.kit.measure import file_value
from runbook.folder.launch.documents import load_of
from runbook.records import Reason
from runbook.records.evidence import Fact

Value = str | float | bool


@dataclass(frozen=True)
class _Setting:
    """When a value skews numbers, and what to do. `gpu`: only a profile with GPUs minds."""

    words: str
    skews: Callable[[Value], bool]
    remedy: str
    gpu: bool = False


def _above(limit: float) -> Callable[[Value], bool]:
    return lambda value: isinstance(value, int | float) and value > limit


def _below(limit: float) -> Callable[[Value], bool]:
    return lambda value: isinstance(value, int | float) and value < limit


def _is(bad: Value) -> Callable[[Value], bool]:
    return lambda value: value == bad


def _not(good: Value) -> Callable[[Value], bool]:
    return lambda value: value != good


_SETTINGS = {
    "numa_balancing": _Setting(
        "NUMA balancing moves pages", _is(True), "sysctl kernel.numa_balancing=0", gpu=True
    ),
    "iommu_translates": _Setting(
        "the IOMMU translates transfers", _is(True), "boot with iommu=pt", gpu=True
    ),
    "acs_redirects": _Setting(
        "PCIe ACS redirects transfers between GPUs",
        _is(True),
        "switch ACS off in the firmware or with setpci",
        gpu=True,
    ),
    "memlock_mib": _Setting(
        "locked memory is limited",
        _not("unlimited"),
        "ulimit -l unlimited (container: --ulimit)",
        gpu=True,
    ),
    "shm_gib": _Setting(
        "shared memory (/dev/shm) is small",
        _below(SHM_LEAST_GIB),
        "mount it larger (container: --shm-size)",
    ),
    "shm_free_gib": _Setting(
        "shared memory (/dev/shm) is nearly full",
        _below(SHM_LEAST_GIB),
        "remove what is left in it",
    ),
    "cpu_governor": _Setting(
        "the CPU governor saves power",
        _not("performance"),
        "cpupower frequency-set -g performance",
    ),
    "load_per_cpu": _Setting(
        "the machine is loaded (runnable per CPU)", _above(BUSY_SHARE), "end other work"
    ),
    "busy_cpus": _Setting(
        "other processes keep CPUs busy", _above(1.0), "end them, or run when it is quiet"
    ),
    "hugepages": _Setting(
        "transparent hugepages are off",
        _is("never"),
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    ),
    "swap_used_mib": _Setting("swap is in use", _above(64.0), "free memory, then swapoff -a"),
    "cpu_quota": _Setting(
        "a quota stops the container's CPUs",
        _not("none"),
        "give it whole CPUs (--cpuset-cpus)",
    ),
}


def host_settings(case: Case) -> Finding:
    """A warning that names each setting that skews numbers, and each that could not be read."""
    facts = case.evidence.facts
    known = {name: facts[f"host.{name}"] for name in _SETTINGS if f"host.{name}" in facts}
    if not known:
        raise missing("no setting of the host was collected")
    relevant = {
        name: fact
        for name, fact in known.items()
        if case.profile.has_gpu or not _SETTINGS[name].gpu
    }
    told = [text for name, fact in relevant.items() if (text := _skewing(name, fact))]
    silent = [f"{name} ({fact.note})" for name, fact in relevant.items() if fact.value is None]
    paths = tuple(dict.fromkeys(fact.path for fact in known.values()))
    parts = [*told, *([f"unreadable: {', '.join(silent)}"] if silent else [])]
    if told:
        return warned("; ".join(parts), evidence=paths)
    fine = f"{len(relevant) - len(silent)} settings read, none skews numbers"
    return passed("; ".join([fine, *parts]), evidence=paths)


def _skewing(name: str, fact: Fact) -> str:
    setting = _SETTINGS[name]
    if fact.value is None or not setting.skews(fact.value):
        return ""
    unit = f" {fact.unit}" if fact.unit else ""
    value = "" if isinstance(fact.value, bool) else f" ({fact.value}{unit})"
    return f"{setting.words}{value}: {setting.remedy}"


def other_work(case: Case, name: str) -> Finding:
    """A warning where others took more of the CPUs than `OTHER_WORK_SHARE`.

    SKIPPED where it was not recorded, or cannot be told: of a launch that was ended from here not
    all processes are known to have been its own.
    """
    launch = case.launch(name)
    load = load_of([launch.load])
    if load is None:
        why = (launch.load or {}).get("problem") or "the load was not recorded"
        return skipped(Reason.NOTHING_COLLECTED, f"{name}: {why}")
    if not launch.result.ok:
        return skipped(Reason.NOTHING_COLLECTED, f"{name} did not finish")
    value = file_value(launch, "load", "other_work", round(load.taken, 4), "of the CPUs")
    if load.taken > OTHER_WORK_SHARE:
        reason = f"{name}: {load}; more than {OTHER_WORK_SHARE:.0%} skews what is timed here"
        return warned(reason, measurement=value)
    return passed(f"{name}: {load}", measurement=value)
