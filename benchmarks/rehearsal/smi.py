"""What nvidia-smi prints: `-q -x` in the shapes of five drivers, `topo -m`, and CSV queries.

Written from NVIDIA's manual ("nvidia-smi", and the comments of nvsmi_device_v12.dtd and v13.dtd)
and from outputs that people have published. What changed between drivers, as far as it matters:

- up to 530 the reasons for lower clocks are `clocks_throttle_reasons`, from 535 on
  `clocks_event_reasons`; 570 adds counters of them;
- up to 530 power is `power_readings`; then `gpu_power_readings` beside `module_power_readings`,
  whose `power_draw` becomes `average_power_draw` and `instant_power_draw` in 570;
- uncorrectable errors of the SRAM are one number up to 535, parity and SEC-DED from 550 on;
- 570 adds `gpu_recovery_action` and repairs of channels and TPCs; 580 writes v13 of the DTD.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.rehearsal.cards import Card

Node = tuple[str, "str | list[Node]"]
_NA = "N/A"


@dataclass(frozen=True, kw_only=True)
class Driver:
    """A driver branch and the shape of its output."""

    version: str
    cuda: str
    dtd: str = "v12"
    reasons: str = "event"
    power: str = "gpu"
    split_sram: bool = True
    late: bool = False


DRIVERS = {
    "525": Driver(
        version="525.147.05", cuda="12.0", reasons="throttle", power="old", split_sram=False
    ),
    "535": Driver(version="535.183.06", cuda="12.2", split_sram=False),
    "550": Driver(version="550.144.03", cuda="12.4"),
    "570": Driver(version="570.172.08", cuda="12.8", late=True),
    "580": Driver(version="580.95.05", cuda="13.0", dtd="v13", late=True),
}


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process with a context on a GPU; `kind` as nvidia-smi has it: C, G or C+G."""

    pid: int
    name: str
    used_mib: int
    kind: str = "C"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU at one moment. Counts of errors are those since the driver was loaded."""

    index: int
    card: Card
    uuid: str
    bus: str
    pcie_gen: int = 1
    pcie_gen_max: int = 4
    pcie_width: int = 16
    pcie_width_max: int = 16
    used_mib: int = 4
    processes: tuple[Process, ...] = ()
    performance_state: str = "P0"
    reasons: tuple[str, ...] = ("gpu_idle",)
    sram_parity: int = 0
    sram_secded: int = 0
    dram_uncorrectable: int = 0
    dram_correctable: int = 0
    remapped_uncorrectable: int = 0
    remap_pending: bool = False
    remap_failure: bool = False
    mig: bool = False
    replays: int = 0
    temperature: int = 34
    power_w: float = 62.0
    power_limit_w: float | None = None
    utilization: int = 0
    sm_mhz: int = 210
    recovery_action: str = "None"


REASONS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "display_clocks_setting",
)
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


def query_xml(
    driver: Driver, gpus: Sequence[Gpu], *, when: str = "Sun Nov 22 06:00:00 2026"
) -> str:
    """The document of `nvidia-smi -q -x`."""
    head: list[Node] = [
        ("timestamp", when),
        ("driver_version", driver.version),
        ("cuda_version", driver.cuda),
        ("attached_gpus", str(len(gpus))),
    ]
    lines = ['<?xml version="1.0" ?>']
    lines.append(f'<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_{driver.dtd}.dtd">')
    lines.append("<nvidia_smi_log>")
    lines += [line for node in head for line in _lines(node, 1)]
    for gpu in gpus:
        lines.append(f'\t<gpu id="{gpu.bus}">')
        lines += [line for node in _gpu(driver, gpu) for line in _lines(node, 2)]
        lines += ["\t</gpu>", ""]
    return "\n".join([*lines, "</nvidia_smi_log>", ""])


def _lines(node: Node, depth: int) -> list[str]:
    tag, content = node
    indent = "\t" * depth
    if isinstance(content, str):
        return [f"{indent}<{tag}>{escape(content)}</{tag}>"]
    inner = [line for child in content for line in _lines(child, depth + 1)]
    return [f"{indent}<{tag}>", *inner, f"{indent}</{tag}>"]


def _gpu(driver: Driver, gpu: Gpu) -> list[Node]:
    return [
        *_identity(driver, gpu),
        ("pci", _pci(gpu)),
        ("fan_speed", _NA),
        ("performance_state", gpu.performance_state),
        *_clock_reasons(driver, gpu),
        *_memory(driver, gpu),
        ("compute_mode", "Default"),
        ("utilization", _utilization(driver, gpu)),
        ("ecc_mode", [("current_ecc", "Enabled"), ("pending_ecc", "Enabled")]),
        ("ecc_errors", _ecc(driver, gpu)),
        ("retired_pages", _retired()),
        ("remapped_rows", _remapped(gpu)),
        ("temperature", _temperature(gpu)),
        *_power(driver, gpu),
        *_clocks(gpu),
        ("fabric", _fabric(driver, gpu)),
        ("processes", [("process_info", _process(process)) for process in gpu.processes]),
        ("accounted_processes", []),
    ]


def _identity(driver: Driver, gpu: Gpu) -> list[Node]:
    mig = "Enabled" if gpu.mig else "Disabled"
    nodes: list[Node] = [
        ("product_name", gpu.card.name),
        ("product_brand", "NVIDIA"),
        ("product_architecture", gpu.card.architecture),
        ("display_mode", "Enabled"),
        ("display_active", "Disabled"),
        ("persistence_mode", "Enabled"),
        ("addressing_mode", "None"),
        ("mig_mode", [("current_mig", mig), ("pending_mig", mig)]),
        ("mig_devices", [("mig_device", _instance(gpu, n)) for n in (0, 1)] if gpu.mig else "None"),
        ("accounting_mode", "Disabled"),
        ("accounting_mode_buffer_size", "4000"),
        ("driver_model", [("current_dm", _NA), ("pending_dm", _NA)]),
        ("serial", f"16541230{gpu.index:05d}"),
        ("uuid", gpu.uuid),
        ("minor_number", str(gpu.index)),
        ("multigpu_board", "No"),
        ("gpu_part_number", gpu.card.part),
        ("gpu_virtualization_mode", [("virtualization_mode", "None"), ("host_vgpu_mode", _NA)]),
        (
            "gpu_reset_status",
            [("reset_required", "No"), ("drain_and_reset_recommended", "No")],
        ),
    ]
    if driver.late:
        nodes.append(("gpu_recovery_action", gpu.recovery_action))
    return nodes


def _instance(gpu: Gpu, number: int) -> list[Node]:
    total = gpu.card.memory_mib // 2
    return [
        ("index", str(number)),
        ("gpu_instance_id", str(number + 1)),
        ("compute_instance_id", "0"),
        ("device_attributes", [("shared", [("multiprocessor_count", "42")])]),
        ("ecc_error_count", [("volatile_count", [("sram_uncorrectable", "0")])]),
        (
            "fb_memory_usage",
            [("total", f"{total} MiB"), ("used", "19 MiB"), ("free", f"{total - 19} MiB")],
        ),
    ]


def _pci(gpu: Gpu) -> list[Node]:
    domain, bus, device = gpu.bus.replace(".0", "").split(":")
    generation: list[Node] = [
        ("max_link_gen", str(gpu.pcie_gen_max)),
        ("current_link_gen", str(gpu.pcie_gen)),
        ("device_current_link_gen", str(gpu.pcie_gen)),
        ("max_device_link_gen", str(gpu.card.pcie_gen)),
        ("max_host_link_gen", str(gpu.pcie_gen_max)),
    ]
    widths: list[Node] = [
        ("max_link_width", f"{gpu.pcie_width_max}x"),
        ("current_link_width", f"{gpu.pcie_width}x"),
    ]
    return [
        ("pci_bus", bus),
        ("pci_device", device),
        ("pci_domain", domain[-4:]),
        ("pci_device_id", gpu.card.device_id),
        ("pci_bus_id", gpu.bus),
        ("pci_gpu_link_info", [("pcie_gen", generation), ("link_widths", widths)]),
        ("replay_counter", str(gpu.replays)),
        ("replay_rollover_counter", "0"),
        ("tx_util", "0 KB/s"),
        ("rx_util", "0 KB/s"),
    ]


def _clock_reasons(driver: Driver, gpu: Gpu) -> list[Node]:
    kind = driver.reasons
    reasons: list[Node] = [
        (f"clocks_{kind}_reason_{name}", "Active" if name in gpu.reasons else "Not Active")
        for name in REASONS
    ]
    nodes: list[Node] = [(f"clocks_{kind}_reasons", reasons)]
    if driver.late:
        prefix = "clocks_event_reasons_counters"
        counted = ("sw_power_cap", "sync_boost", "sw_therm_slowdown", "hw_therm_slowdown")
        counters: list[Node] = [
            (f"{prefix}_{name}", "0 us") for name in (*counted, "hw_power_brake")
        ]
        nodes.append((prefix, counters))
    return nodes


def _memory(driver: Driver, gpu: Gpu) -> list[Node]:
    total, reserved = gpu.card.memory_mib, 600
    used = _NA if gpu.mig else f"{gpu.used_mib} MiB"
    nodes: list[Node] = [
        (
            "fb_memory_usage",
            [
                ("total", f"{total} MiB"),
                ("reserved", f"{reserved} MiB"),
                ("used", used),
                ("free", f"{total - reserved - gpu.used_mib} MiB"),
            ],
        ),
        (
            "bar1_memory_usage",
            [("total", "131072 MiB"), ("used", "1 MiB"), ("free", "131071 MiB")],
        ),
    ]
    if driver.power != "old":
        zero: list[Node] = [("total", "0 MiB"), ("used", "0 MiB"), ("free", "0 MiB")]
        nodes.append(("cc_protected_memory_usage", zero))
    return nodes


def _utilization(driver: Driver, gpu: Gpu) -> list[Node]:
    shown = _NA if gpu.mig else f"{gpu.utilization} %"
    nodes: list[Node] = [("gpu_util", shown), ("memory_util", shown)]
    nodes += [("encoder_util", "0 %"), ("decoder_util", "0 %")]
    if driver.power != "old":
        nodes += [("jpeg_util", "0 %"), ("ofa_util", "0 %")]
    return nodes


def _ecc(driver: Driver, gpu: Gpu) -> list[Node]:
    if driver.split_sram:
        sram: list[Node] = [
            ("sram_uncorrectable_parity", str(gpu.sram_parity)),
            ("sram_uncorrectable_secded", str(gpu.sram_secded)),
        ]
    else:
        sram = [("sram_uncorrectable", str(gpu.sram_parity + gpu.sram_secded))]
    counts: list[Node] = [
        ("sram_correctable", "0"),
        *sram,
        ("dram_correctable", str(gpu.dram_correctable)),
        ("dram_uncorrectable", str(gpu.dram_uncorrectable)),
    ]
    nodes: list[Node] = [("volatile", counts)]
    if driver.split_sram:
        sources = ("l2", "sm", "microcontroller", "pcie", "other")
        nodes.append(("aggregate", [*counts, ("sram_threshold_exceeded", "No")]))
        nodes.append(
            ("aggregate_uncorrectable_sram_sources", [(f"sram_{name}", "0") for name in sources])
        )
    else:
        nodes.append(("aggregate", counts))
    if driver.late:
        nodes += [("channel_repair_pending", "No"), ("tpc_repair_pending", "No")]
    return nodes


def _retired() -> list[Node]:
    none: list[Node] = [("retired_count", _NA), ("retired_pagelist", _NA)]
    return [
        ("multiple_single_bit_retirement", none),
        ("double_bit_retirement", none),
        ("pending_blacklist", _NA),
        ("pending_retirement", _NA),
    ]


def _remapped(gpu: Gpu) -> list[Node]:
    banks = 640 - gpu.remapped_uncorrectable
    histogram: list[Node] = [("row_remapper_histogram_max", f"{banks} bank(s)")]
    histogram.append(("row_remapper_histogram_high", f"{gpu.remapped_uncorrectable} bank(s)"))
    histogram += [(f"row_remapper_histogram_{n}", "0 bank(s)") for n in ("partial", "low", "none")]
    return [
        ("remapped_row_corr", "0"),
        ("remapped_row_unc", str(gpu.remapped_uncorrectable)),
        ("remapped_row_pending", "Yes" if gpu.remap_pending else "No"),
        ("remapped_row_failure", "Yes" if gpu.remap_failure else "No"),
        ("row_remapper_histogram", histogram),
    ]


def _temperature(gpu: Gpu) -> list[Node]:
    return [
        ("gpu_temp", f"{gpu.temperature} C"),
        ("gpu_temp_tlimit", f"{85 - gpu.temperature} C"),
        ("gpu_temp_max_threshold", "92 C"),
        ("gpu_temp_slow_threshold", "89 C"),
        ("gpu_temp_max_gpu_threshold", "85 C"),
        ("gpu_target_temperature", _NA),
        ("memory_temp", f"{gpu.temperature + 6} C"),
        ("gpu_temp_max_mem_threshold", "95 C"),
    ]


def _power(driver: Driver, gpu: Gpu) -> list[Node]:
    limit = f"{gpu.power_limit_w or gpu.card.power_w:.2f} W"
    default = f"{gpu.card.power_w:.2f} W"
    draw = f"{gpu.power_w:.2f} W"
    if driver.power == "old":
        return [
            (
                "power_readings",
                [
                    ("power_state", gpu.performance_state),
                    ("power_management", "Supported"),
                    ("power_draw", draw),
                    ("power_limit", limit),
                    ("default_power_limit", default),
                    ("enforced_power_limit", limit),
                    ("max_power_limit", default),
                ],
            )
        ]
    names = ("average_power_draw", "instant_power_draw") if driver.late else ("power_draw",)
    limits = ("current_power_limit", "requested_power_limit", "default_power_limit")
    return [
        (
            "gpu_power_readings",
            [
                ("power_state", gpu.performance_state),
                *((name, draw) for name in names),
                ("current_power_limit", limit),
                ("requested_power_limit", limit),
                ("default_power_limit", default),
                ("max_power_limit", default),
            ],
        ),
        ("gpu_memory_power_readings", [(name, _NA) for name in names]),
        ("module_power_readings", [("power_state", gpu.performance_state),
                                   *((name, _NA) for name in (*names, *limits))]),
    ]  # fmt: skip


def _clocks(gpu: Gpu) -> list[Node]:
    card = gpu.card

    def block(sm: int) -> list[Node]:
        return [
            ("graphics_clock", f"{sm} MHz"),
            ("sm_clock", f"{sm} MHz"),
            ("mem_clock", f"{card.memory_mhz} MHz"),
            ("video_clock", f"{min(sm, 1290)} MHz"),
        ]

    return [
        ("clocks", block(gpu.sm_mhz)),
        ("applications_clocks", block(card.sm_mhz)[:1]),
        ("max_clocks", block(card.sm_mhz)),
    ]


def _fabric(driver: Driver, gpu: Gpu) -> list[Node]:
    joined = gpu.card.architecture == "Hopper"
    nodes: list[Node] = [
        ("state", "Completed" if joined else _NA),
        ("status", "Success" if joined else _NA),
    ]
    if driver.split_sram:
        nodes += [("cliqueId", _NA), ("clusterUuid", _NA)]
        nodes.append(("health", [("bandwidth", _NA)]))
    return nodes


def _process(process: Process) -> list[Node]:
    return [
        ("gpu_instance_id", _NA),
        ("compute_instance_id", _NA),
        ("pid", str(process.pid)),
        ("type", process.kind),
        ("process_name", process.name),
        ("used_memory", f"{process.used_mib} MiB"),
    ]


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
        lines.append("\t".join([row, *cells, "0-15", "0", _NA]))
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
