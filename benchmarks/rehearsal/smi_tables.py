"""What nvidia-smi prints as tables: `topo -m`, `--query-gpu`, and the names that it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.rehearsal.drivers import NOT_AVAILABLE, Driver, Gpu

# Bits of clocks_event_reasons.active: NVML's nvmlClocksEventReason constants.
_BITS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clocks_setting": 0x100,
}
_LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def topology(gpus: Sequence[Gpu], link: str) -> str:
    """The matrix of `nvidia-smi topo -m`; its header is underlined by escape codes."""
    names = [f"GPU{gpu.index}" for gpu in gpus]
    tail = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    lines = ["\t\x1b[4m" + "\t".join([*names, *tail]) + "\x1b[0m"]
    for row in names:
        cells = [" X " if row == column else link for column in names]
        lines.append("\t".join([row, *cells, "0-15", "0", NOT_AVAILABLE]))
    return "\n".join(lines) + "\n" + _LEGEND


def fields(gpu: Gpu, driver: Driver, *, when: str) -> Mapping[str, str]:
    """Values of `--query-gpu` for one GPU, without units; what this driver calls them."""
    mask = sum(_BITS[name] for name in gpu.reasons)
    reasons = "clocks_throttle_reasons" if driver.reasons == "throttle" else "clocks_event_reasons"
    unknown = "[N/A]"
    named = {
        "timestamp": when,
        "index": str(gpu.index),
        "name": gpu.card.name,
        "uuid": gpu.uuid,
        "driver_version": driver.version,
        "pci.bus_id": gpu.bus,
        "utilization.gpu": unknown if gpu.mig else str(gpu.utilization),
        "utilization.memory": unknown if gpu.mig else str(gpu.utilization // 2),
        "memory.used": str(gpu.used_mib),
        "memory.total": str(gpu.card.memory_mib),
        "memory.free": str(gpu.card.memory_mib - gpu.used_mib),
        "power.draw": f"{gpu.power_w:.2f}",
        "power.limit": f"{gpu.power_limit_w or gpu.card.power_w:.2f}",
        "temperature.gpu": str(gpu.temperature),
        "temperature.memory": str(gpu.temperature + 6),
        "clocks.sm": str(gpu.sm_mhz),
        "clocks.mem": str(gpu.card.memory_mhz),
        "clocks.max.sm": str(gpu.card.sm_mhz),
        "pstate": gpu.performance_state,
        f"{reasons}.active": f"0x{mask:016X}",
        "pcie.link.gen.current": str(gpu.pcie_gen),
        "pcie.link.gen.max": str(gpu.pcie_gen_max),
        "pcie.link.width.current": str(gpu.pcie_width),
        "pcie.link.width.max": str(gpu.pcie_width_max),
        "mig.mode.current": "Enabled" if gpu.mig else "Disabled",
        "ecc.mode.current": "Enabled",
        "ecc.errors.corrected.volatile.total": str(gpu.dram_correctable),
        "ecc.errors.uncorrected.volatile.total": str(
            gpu.sram_parity + gpu.sram_secded + gpu.dram_uncorrectable
        ),
        "ecc.errors.uncorrected.volatile.dram": str(gpu.dram_uncorrectable),
        "ecc.errors.uncorrected.volatile.sram": str(gpu.sram_parity + gpu.sram_secded),
        "compute_mode": "Default",
    }
    if driver.reasons == "event":  # newer drivers still answer to the older name
        named["clocks_throttle_reasons.active"] = f"0x{mask:016X}"
    return named


def help_query(driver: Driver, gpu: Gpu) -> str:
    """`nvidia-smi --help-query-gpu`, as far as names go."""
    known = fields(gpu, driver, when="")
    if driver.reasons == "event":
        known = {name: text for name, text in known.items() if "throttle" not in name}
    listed = "\n\n".join(f'"{name}"\nDescribed in NVIDIA\'s manual.' for name in known)
    return f'List of valid properties to query for the switch "--query-gpu":\n\n{listed}\n'
