"""The machine around the GPUs: processors, memory, disk, the rendezvous port, InfiniBand."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "DEFAULT_RENDEZVOUS_PORT",
    "PortState",
    "cgroup_cpu_limit",
    "count_cpus",
    "disk_free_gib",
    "find_infiniband",
    "memory_total_gib",
    "probe_port",
    "write_speed_mib_s",
]

DEFAULT_RENDEZVOUS_PORT = 29500
"""The port that torchrun takes unless told otherwise."""

_GIB = 1024**3
_MIB = 1024**2
_PROBE_MIB = 64


def count_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def cgroup_cpu_limit(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Processors that a container's quota allows, or None without a quota."""
    text = _read(root / "cpu.max").split()
    if len(text) != 2 or not text[0].isdigit():
        return None
    return int(text[0]) / int(text[1])


def memory_total_gib(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Memory of the machine, or of the container where that is less."""
    sizes = []
    for line in _read(meminfo).splitlines():
        if line.startswith("MemTotal:"):
            sizes.append(int(line.split()[1]) * 1024)
    if (limit := _read(cgroup / "memory.max").strip()).isdigit():
        sizes.append(int(limit))
    return min(sizes) / _GIB if sizes else None


def disk_free_gib(folder: Path) -> float:
    """Free space where the artifacts go."""
    return shutil.disk_usage(folder).free / _GIB


def write_speed_mib_s(folder: Path, *, size_mib: int = _PROBE_MIB) -> float:
    """Write and sync a file that has no name and is gone afterwards. Raises OSError."""
    # Random bytes, because some file systems do not store zeros.
    block = os.urandom(_MIB)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
        started = time.perf_counter()
        for _ in range(size_mib):
            probe.write(block)
        os.fsync(probe.fileno())
        return size_mib / (time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True)
class PortState:
    """Whether a port can be bound, and by which process it is held if that can be seen."""

    port: int
    free: bool
    owner: str = ""


def probe_port(port: int = DEFAULT_RENDEZVOUS_PORT) -> PortState:
    """Bind the port on all interfaces for a moment, as torchrun's store would."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return PortState(port=port, free=False, owner=_port_owner(port))
    return PortState(port=port, free=True)


def _port_owner(port: int) -> str:
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return ""
    pids = {item.pid for item in connections if item.laddr and item.laddr.port == port and item.pid}
    owners = []
    for pid in sorted(pids):
        try:
            owners.append(f"pid {pid} ({psutil.Process(pid).name()})")
        except psutil.NoSuchProcess:
            continue
    return ", ".join(owners)


def find_infiniband(root: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    """Ports of InfiniBand devices with their state, such as {"mlx5_0/1": "ACTIVE"}.

    Ports whose link layer is Ethernet (RoCE) are listed with that word behind the state.
    """
    found = {}
    for state in sorted(root.glob("*/ports/*/state")):
        name = f"{state.parents[2].name}/{state.parent.name}"
        word = _read(state).strip().rpartition(":")[2].strip()
        layer = _read(state.parent / "link_layer").strip()
        found[name] = word if layer in ("", "InfiniBand") else f"{word} {layer}"
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
