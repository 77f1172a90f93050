"""Settings and load of the host that skew numbers: read here, judged by nobody but a warning.

Each is a fact of preflight. One that cannot be read is there without a value, and says why.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from runbook.machine.host import cgroup_cpu_limit, count_cpus
from runbook.process.start import run_tool
from runbook.records.evidence import Fact

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


_Value = str | float | bool | None
# A value and a note on it.
_Found = tuple[_Value, str]


def collect_host_settings(file: str, root: Path = Path("/")) -> list[Fact]:
    """The facts `host.*`, in the file of the host's other facts; takes a quarter of a second.

    `root` is where `dev`, `proc` and `sys` are looked for.
    """
    drafts = []
    for name, (read, unit) in _SETTINGS.items():
        try:
            value, note = read(root)
        except OSError as error:
            value, note = None, f"{error.filename}: {error.strerror or error}"
        note = note or ("" if value is not None else "not told on this machine")
        drafts.append(Fact(name=f"host.{name}", value=value, path=file, unit=unit, note=note))
    return drafts


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace").strip()


def _readable(paths: Iterable[Path]) -> list[str]:
    """The texts of those that can be read."""
    found = []
    for path in paths:
        with suppress(OSError):
            found.append(_text(path))
    return found


def _numa_balancing(root: Path) -> _Found:
    text = _text(root / "proc/sys/kernel/numa_balancing")
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    state = "on" if text not in ("", "0") else "off"
    return state == "on" and nodes > 1, f"{state}, {nodes} NUMA node(s)"


def _iommu(root: Path) -> _Found:
    """Is the IOMMU in the way of transfers? Passed through, it is not."""
    path = root / "sys/kernel/iommu_groups"
    groups = sum(1 for _ in path.iterdir())
    line = " ".join(_readable([root / "proc/cmdline"]))
    words = [word for word in line.split() if _CMDLINE.match(word)]
    kinds = sorted(set(_readable(path.glob("*/type"))))
    through = kinds == ["identity"] or {"iommu=pt", "iommu.passthrough=1"} & set(words)
    said = f"{groups} group(s), {', '.join(kinds) or 'types unknown'}"
    note = f"{said}; boot options: {' '.join(words) or 'none'}"
    return groups > 0 and not through, note


def _acs(_: Path) -> _Found:
    """Access control services redirect transfers between GPUs over the root complex."""
    tool = shutil.which("lspci")
    if tool is None:
        return None, "lspci is not installed"
    result = run_tool([tool, "-vvv"], timeout_s=_LSPCI_TIMEOUT_S)
    if not result.ok:
        return None, result.problem
    if "ACSCtl" not in result.stdout:
        denied = "access denied" in result.stdout
        return (None, "lspci may not read it: run as root") if denied else (False, "")
    active = len(_ACS.findall(result.stdout))
    return active > 0, f"{active} port(s) redirect"


def _memlock(_: Path) -> _Found:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else round(soft / _MIB, 3), ""


def _shm_size(root: Path) -> _Found:
    usage = shutil.disk_usage(root / "dev/shm")
    return round(usage.total / _GIB, 3), f"{usage.free / _GIB:.2f} GiB free"


def _shm_free(root: Path) -> _Found:
    return round(shutil.disk_usage(root / "dev/shm").free / _GIB, 3), ""


def _governor(root: Path) -> _Found:
    paths = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    found = ", ".join(sorted(set(_readable(paths))))
    without = "no cpufreq: set by the host of a virtual machine, or by the firmware"
    return (found, "") if found else (None, without)


def _load(_: Path) -> _Found:
    return round(os.getloadavg()[0] / count_cpus(), 3), "mean of the last minute"


def _others(_: Path) -> _Found:
    """Processors that others keep busy now, while this program waits."""
    share, cores = psutil.cpu_percent(interval=_OBSERVED_S) / 100, psutil.cpu_count() or 1
    return round(share * cores, 2), f"of {cores}, over {_OBSERVED_S:g} s"


def _hugepages(root: Path) -> _Found:
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    text = _text(path)
    chosen = re.search(r"\[(\w+)\]", text)
    return (chosen.group(1), "") if chosen else (None, f"{path}: {text[:40]!r}")


def _swap(_: Path) -> _Found:
    return round(psutil.swap_memory().used / _MIB, 1), ""


def _quota(root: Path) -> _Found:
    """Processors that the container's quota allows: `cpu.max`, or the files of the older groups."""
    groups = root / "sys/fs/cgroup"
    limit = cgroup_cpu_limit(groups)
    if limit is not None or (groups / "cgroup.controllers").exists():
        return "none" if limit is None else limit, "cgroup cpu.max"
    told = _readable(groups / f"cpu/cpu.cfs_{name}_us" for name in ("quota", "period"))
    if len(told) < 2:
        return None, f"{groups}: neither cpu.max nor cpu.cfs_quota_us can be read"
    quota, period = (int(text) if text.isdigit() else 0 for text in told)
    return quota / period if quota and period else "none", "cgroup cpu.cfs_quota_us"


_SETTINGS: dict[str, tuple[Callable[[Path], _Found], str]] = {
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
