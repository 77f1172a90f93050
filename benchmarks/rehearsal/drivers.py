"""What nvidia-smi has to tell: drivers with the shapes of their outputs, and the state of a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.rehearsal.cards import Card

# What it says where there is nothing to say.
NOT_AVAILABLE = "N/A"


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
