"""Cards, drivers and the state of a GPU (data in hardware.yaml), and what nvidia-smi tells of them.

`nvidia-smi -q -x` comes in the shapes of five drivers: nvidia_smi.txt has the text, which is
filled in here.

What changed between drivers, as far as it matters:

- up to 530 the reasons for lower clocks are `clocks_throttle_reasons`, from 535 on
  `clocks_event_reasons`; 570 adds counters of them;
- up to 530 power is `power_readings`; then `gpu_power_readings` beside `module_power_readings`,
  whose `power_draw` becomes `average_power_draw` and `instant_power_draw` in 570;
- uncorrectable errors of the SRAM are one number up to 535, parity and SEC-DED from 550 on;
- 570 adds `gpu_recovery_action` and repairs of channels and TPCs; 580 writes v13 of the DTD.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import yaml

# What nvidia-smi says where there is nothing to say.
NOT_AVAILABLE = "N/A"


@dataclass(frozen=True, kw_only=True)
class Card:
    """One kind of card. `bf16_tflops` dense and `memory_gb_s` are the data sheet's peaks.

    masked_tflops: what an attention kernel with an explicit mask reaches. It is an assumption
    of this rehearsal: the data sheets know nothing of it.
    """

    name: str
    architecture: str
    memory_mib: int
    bf16_tflops: float
    memory_gb_s: float
    masked_tflops: float
    power_w: int
    sm_mhz: int
    memory_mhz: int
    pcie_gen: int
    nvlinks: int
    device_id: str
    part: str


@dataclass(frozen=True, kw_only=True)
class Driver:
    """A driver branch, and its word for the reasons of lower clocks."""

    version: str
    cuda: str
    dtd: str = "v12"
    reasons: str = "event"


_DATA = yaml.safe_load(Path(__file__).with_name("hardware.yaml").read_text(encoding="utf-8"))
CARDS = {key: Card(**fields) for key, fields in _DATA["cards"].items()}
DRIVERS = {key: Driver(**fields) for key, fields in _DATA["drivers"].items()}
A100_PCIE = CARDS["a100_pcie"]


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
    used_mib: int = 4
    processes: Sequence[Process] = ()
    performance_state: str = "P0"
    reasons: Sequence[str] = ("gpu_idle",)
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


_, _HEAD, _GPU, _INSTANCE, _PROCESS = (
    Path(__file__).with_name("nvidia_smi.txt").read_text(encoding="utf-8").split("\n\n")
)
_OF_DRIVERS = re.compile(r"(\d+)-(\d+)\s*(<.*)")
_REASONS = (
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "hw_thermal_slowdown",
    "hw_power_brake_slowdown", "sync_boost", "sw_thermal_slowdown", "display_clocks_setting",
)  # fmt: skip


def query_xml(driver: Driver, gpus: Sequence[Gpu]) -> str:
    """The document of `nvidia-smi -q -x`."""
    branch = int(driver.version.partition(".")[0])
    head = _HEAD.format(**asdict(driver), attached=len(gpus))
    found = [_text_for(branch).format(**_fields(driver, gpu)) for gpu in gpus]
    return "\n".join([head, *found, "</nvidia_smi_log>", ""])


def _text_for(branch: int) -> str:
    """The lines that a driver prints of a GPU."""
    lines = ((line, _OF_DRIVERS.match(line)) for line in _GPU.splitlines())
    told = (of[3] if of else line for line, of in lines if not of or branch in _span(of))
    return "\n".join(told)


def _span(of: re.Match[str]) -> range:
    return range(int(of[1]), int(of[2]) + 1)


def _fields(driver: Driver, gpu: Gpu) -> dict[str, object]:
    """What stands in the text for this GPU."""
    card = gpu.card
    domain, bus, device = gpu.bus.removesuffix(".0").split(":")
    reasons = {name: "Active" if name in gpu.reasons else "Not Active" for name in _REASONS}
    return {
        **asdict(card),
        **{name: escape(str(value)) for name, value in asdict(gpu).items()},
        **reasons,
        "mig": "Enabled" if gpu.mig else "Disabled",
        "mig_devices": "".join(_instance(gpu, n) for n in (0, 1)) if gpu.mig else "None",
        "pci_domain": domain[-4:],
        "pci_bus": bus,
        "pci_device": device,
        "card_pcie_gen": card.pcie_gen,
        "kind": driver.reasons,
        "used": NOT_AVAILABLE if gpu.mig else f"{gpu.used_mib} MiB",
        "free_mib": card.memory_mib - 600 - gpu.used_mib,
        "busy": NOT_AVAILABLE if gpu.mig else f"{gpu.utilization} %",
        "sram": gpu.sram_parity + gpu.sram_secded,
        "remap_pending": "Yes" if gpu.remap_pending else "No",
        "remap_failure": "Yes" if gpu.remap_failure else "No",
        "limit": f"{gpu.power_limit_w or card.power_w:.2f} W",
        "default": f"{card.power_w:.2f} W",
        "draw": f"{gpu.power_w:.2f} W",
        "most_mhz": card.sm_mhz,
        "processes": "".join(_PROCESS.format(**asdict(one)) for one in gpu.processes),
    }


def _instance(gpu: Gpu, number: int) -> str:
    total = gpu.card.memory_mib // 2
    return _INSTANCE.format(number=number, gpu_instance=number + 1, total=total, free=total - 19)


def topology(gpus: Sequence[Gpu], link: str) -> str:
    """The matrix of `nvidia-smi topo -m`; its header is underlined by escape codes."""
    names = [f"GPU{gpu.index}" for gpu in gpus]
    tail = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    lines = ["\t\x1b[4m" + "\t".join([*names, *tail]) + "\x1b[0m"]
    for row in names:
        cells = [" X " if row == column else link for column in names]
        lines.append("\t".join([row, *cells, "0-15", "0", NOT_AVAILABLE]))
    return "\n".join(lines) + "\n"
