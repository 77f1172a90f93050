"""What `nvidia-smi -q -x` prints, in the shapes of five drivers.

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

from collections.abc import Sequence
from xml.sax.saxutils import escape

from benchmarks.rehearsal.drivers import NOT_AVAILABLE as _NA
from benchmarks.rehearsal.drivers import Driver, Gpu, Process

Node = tuple[str, "str | list[Node]"]
_REASONS = (
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
        for name in _REASONS
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
