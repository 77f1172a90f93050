"""Cards, drivers and the state of a GPU, as nvidia-smi tells of them; data in hardware.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
