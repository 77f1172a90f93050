"""Settings and load of the host that skew numbers: read here, judged by nobody but a warning.

Each is a fact of preflight. One that cannot be read is there without a value, and says why.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from runbook.folder.facts import Draft
from runbook.machine.host import cgroup_cpu_limit, count_cpus
from runbook.process.start import run_tool

_GIB = 1024**3
_MIB = 1024**2
_OBSERVED_S = 0.25
_LSPCI_TIMEOUT_S = 10.0
# Of /proc/cmdline only what decides here: the rest may hold a secret.
_CMDLINE = re.compile(
    r"^(?:iommu|intel_iommu|amd_iommu|iommu\.passthrough|pcie_acs_override|pci|numa_balancing"
    r"|transparent_hugepage|mitigations|intel_pstate|amd_pstate|isolcpus)(?:=.*)?$"
)
_ACS = re.compile(r"ACSCtl:.*(?:SrcValid|ReqRedir|CmpltRedir|UpstreamFwd)\+")


@dataclass(frozen=True)
class Places:
    """Where the kernel tells; tests give folders of their own."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")  # noqa: S108 - the mount itself is looked at, no file made


@dataclass(frozen=True)
class _Read:
    value: str | float | bool | None
    note: str = ""


def collect_host_settings(file: str, places: Places | None = None) -> list[Draft]:
    """The facts `host.*`, in the file of the host's other facts; takes a quarter of a second."""
    where = places or Places()
    drafts = []
    for name, (read, unit) in _SETTINGS.items():
        found = read(where)
        note = found.note or ("" if found.value is not None else "not told on this machine")
        drafts.append(
            Draft(name=f"host.{name}", value=found.value, file=file, unit=unit, note=note)
        )
    return drafts


def _text(path: Path) -> str | OSError:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError as error:
        return error


def _unreadable(path: Path, error: OSError) -> _Read:
    return _Read(None, f"{path}: {error.strerror or error}")


def _numa_balancing(where: Places) -> _Read:
    path = where.proc / "sys/kernel/numa_balancing"
    text = _text(path)
    if isinstance(text, OSError):
        return _unreadable(path, text)
    nodes = len(list((where.sys / "devices/system/node").glob("node[0-9]*")))
    state = "on" if text not in ("", "0") else "off"
    return _Read(state == "on" and nodes > 1, f"{state}, {nodes} NUMA node(s)")


def _iommu(where: Places) -> _Read:
    """Is the IOMMU in the way of transfers? Passed through, it is not."""
    path = where.sys / "kernel/iommu_groups"
    try:
        groups = sum(1 for _ in path.iterdir())
    except OSError as error:
        return _unreadable(path, error)
    line = _text(where.proc / "cmdline")
    words = [] if isinstance(line, OSError) else [w for w in line.split() if _CMDLINE.match(w)]
    kinds = set()
    for group in path.glob("*/type"):
        kind = _text(group)
        if isinstance(kind, str):
            kinds.add(kind)
    through = kinds == {"identity"} or any(
        word in ("iommu=pt", "iommu.passthrough=1") for word in words
    )
    said = f"{groups} group(s), {', '.join(sorted(kinds)) or 'types unknown'}"
    return _Read(groups > 0 and not through, f"{said}; boot options: {' '.join(words) or 'none'}")


def _acs(where: Places) -> _Read:
    """Access control services redirect transfers between GPUs over the root complex."""
    del where
    tool = shutil.which("lspci")
    if tool is None:
        return _Read(None, "lspci is not installed")
    result = run_tool([tool, "-vvv"], timeout_s=_LSPCI_TIMEOUT_S)
    if not result.ok:
        return _Read(None, result.problem)
    if "ACSCtl" not in result.stdout:
        denied = "access denied" in result.stdout
        return _Read(None, "lspci may not read it: run as root") if denied else _Read(False)
    active = len(_ACS.findall(result.stdout))
    return _Read(active > 0, f"{active} port(s) redirect")


def _memlock(where: Places) -> _Read:
    del where
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return _Read("unlimited")
    return _Read(round(soft / _MIB, 3))


def _shm_size(where: Places) -> _Read:
    try:
        usage = shutil.disk_usage(where.shm)
    except OSError as error:
        return _unreadable(where.shm, error)
    return _Read(round(usage.total / _GIB, 3), f"{usage.free / _GIB:.2f} GiB free")


def _shm_free(where: Places) -> _Read:
    try:
        return _Read(round(shutil.disk_usage(where.shm).free / _GIB, 3))
    except OSError as error:
        return _unreadable(where.shm, error)


def _governor(where: Places) -> _Read:
    found = set()
    for path in (where.sys / "devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"):
        text = _text(path)
        if isinstance(text, str):
            found.add(text)
    if not found:
        return _Read(None, "no cpufreq: set by the host of a virtual machine, or by the firmware")
    return _Read(", ".join(sorted(found)))


def _load(where: Places) -> _Read:
    del where
    return _Read(round(os.getloadavg()[0] / count_cpus(), 3), "mean of the last minute")


def _others(where: Places) -> _Read:
    """Processors that others keep busy now, while this program waits."""
    del where
    share = psutil.cpu_percent(interval=_OBSERVED_S) / 100
    cores = psutil.cpu_count() or 1
    return _Read(round(share * cores, 2), f"of {cores}, over {_OBSERVED_S:g} s")


def _hugepages(where: Places) -> _Read:
    path = where.sys / "kernel/mm/transparent_hugepage/enabled"
    text = _text(path)
    if isinstance(text, OSError):
        return _unreadable(path, text)
    chosen = re.search(r"\[(\w+)\]", text)
    return _Read(chosen.group(1)) if chosen else _Read(None, f"{path}: {text[:40]!r}")


def _swap(where: Places) -> _Read:
    del where
    return _Read(round(psutil.swap_memory().used / _MIB, 1))


def _quota(where: Places) -> _Read:
    """Processors that the container's quota allows: `cpu.max`, or the files of the older groups."""
    root = where.sys / "fs/cgroup"
    limit = cgroup_cpu_limit(root)
    if limit is not None:
        return _Read(limit, "cgroup cpu.max")
    if (root / "cgroup.controllers").exists():
        return _Read("none", "cgroup cpu.max")
    quota = _text(root / "cpu/cpu.cfs_quota_us")
    period = _text(root / "cpu/cpu.cfs_period_us")
    if isinstance(quota, OSError) or isinstance(period, OSError):
        return _Read(None, f"{root}: neither cpu.max nor cpu.cfs_quota_us can be read")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return _Read("none", "cgroup cpu.cfs_quota_us")
    return _Read(int(quota) / int(period), "cgroup cpu.cfs_quota_us")


_SETTINGS: dict[str, tuple[Callable[[Places], _Read], str]] = {
    "numa_balancing": (_numa_balancing, ""),
    "iommu_translates": (_iommu, ""),
    "acs_redirects": (_acs, ""),
    "memlock_mib": (_memlock, "MiB"),
    "shm_gib": (_shm_size, "GiB"),
    "shm_free_gib": (_shm_free, "GiB"),
    "cpu_governor": (_governor, ""),
    "load_per_cpu": (_load, ""),
    "busy_cpus": (_others, "CPUs"),
    "hugepages": (_hugepages, ""),
    "swap_used_mib": (_swap, "MiB"),
    "cpu_quota": (_quota, "CPUs"),
}
