"""Every rehearsed machine: its hardware, what is wrong with it, and the rows that should stop it.

They are described in machines.yaml, which says what each field means; cards and drivers are given
by their keys. A machine that slips through is a defect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.rehearsal.hardware import A100_PCIE, CARDS, DRIVERS, Card, Driver, Gpu, Process
from benchmarks.rehearsal.roofline import PCIE_BYTES_S, Pace

# The kernels that torch takes: flash takes no mask.
KERNELS = {"cmp": "explicit_softmax", "sel": "efficient", "win": "efficient"}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """A launch that does not end well. `at` is PHASE/LAUNCH, or PHASE for all of its launches.

    kind: `abort` (a CUDA error, seen by NCCL's watchdog), `timeout` (NCCL's watchdog waited in
    vain), `lost` (the GPU fell off the bus: nothing starts afterwards), `oom`, `nan`.
    attempts: so many attempts end so; a later one goes well.
    """

    kind: str
    at: str
    step: int = 40
    rank: int = 0
    attempts: int = 99
    says: str = ""

    def meets(self, where: str, attempt: int) -> bool:
        """Does this attempt of the launch `where` end so?"""
        return attempt <= self.attempts and self.at in (where, where.partition("/")[0])


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the generator knows of a machine. The defaults are a healthy pair of A100 on PCIe 4.

    stopped_by: rows of which each has to stop it (not PASS, required); none: it must be GO.
    gpu: fields of `Gpu` that differ, by index. paces: of each GPU and its rank.
    loaded_generation: of PCIe under load, where it is not the best that the slot can do.
    after_launch, kernel_log: what the counters show and the kernel writes from a launch on.
    hot, busy_link_bytes_s: paces and the link while it trains, where they are others than those
    of a short measurement.
    slower_at_end: by how much the long run has slowed down when it ends, as a share.
    torch_cuda None: torch was built without CUDA.
    counters_taken_at, kernel_log_of, samples_days: documents of another time, by their own times.
    versions: what env.json tells otherwise in the launches of a phase.
    windows: how the window branch runs in one launch, where it does not by triton.
    self_test: does the trainer test its kernels first?
    held_mhz: the SM clock that somebody set for training, by GPU, which no reason tells.
    told_rates: by how much ceilings.json exaggerates a ceiling, consistently. copied_mib: how much
    a call of a ceiling copies, where it is not what the program copies.
    gradient: `mean` as it should be, or `sum`, or `own` (each rank keeps its own).
    """

    name: str
    profile: str
    story: str
    stopped_by: tuple[str, ...] = ()
    card: Card = A100_PCIE
    gpus: int = 2
    driver: Driver = DRIVERS["580"]
    torch_cuda: str | None = "13.0"
    link: str = "NODE"
    link_bytes_s: float = PCIE_BYTES_S[4]
    loaded_generation: int = 0
    gpu: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    after_launch: Mapping[str, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)
    kernel_log: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    paces: tuple[Pace, ...] = (Pace(), Pace())
    hot: Mapping[int, Pace] = field(default_factory=dict)
    busy_link_bytes_s: float | None = None
    slower_at_end: float = 0.0
    fetch_s: float = 0.0004
    stall_every: int = 0
    stall_s: float = 0.0
    leak_mib_per_step: Mapping[int, float] = field(default_factory=dict)
    learns: bool = True
    kernels: Mapping[str, str] = field(default_factory=lambda: dict(KERNELS))
    gradient: str = "mean"
    attention_error: float = 4.2e-3
    diverges: bool = False
    sampled: bool = True
    counters_taken_at: str = ""
    kernel_log_of: str = ""
    samples_days: float = 0.0
    versions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    windows: Mapping[str, str] = field(default_factory=dict)
    self_test: bool = True
    held_mhz: Mapping[int, int] = field(default_factory=dict)
    told_rates: Mapping[str, float] = field(default_factory=dict)
    copied_mib: Mapping[str, int] = field(default_factory=dict)
    disk_free_gib: float = 800.0
    disk_mib_s: float = 1400.0
    leftovers: Sequence[str] = ()
    failing_tests: Sequence[str] = ()
    v2_speedup: float = 6.4
    ending: Ending | None = None

    @property
    def devices(self) -> int:
        """How many devices torch can use."""
        return 0 if self.torch_cuda is None or self.too_old else self.gpus

    @property
    def too_old(self) -> bool:
        """CUDA 13 needs driver 580, CUDA 12 driver 525 (NVIDIA, "CUDA Toolkit Release Notes")."""
        needed = {"13": 580, "12": 525}[(self.torch_cuda or "12").partition(".")[0]]
        return int(self.driver.version.partition(".")[0]) < needed

    def uuid(self, index: int) -> str:
        """The UUID of a GPU: its own on every machine, the same in every file of it."""
        text = hashlib.sha256(f"{self.name} {index}".encode()).hexdigest()
        return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:32]}"

    def at_rest(self, index: int, **changed: Any) -> Gpu:
        """A GPU with nothing to do: its link rests, and its clocks are low."""
        resting = {
            "pcie_gen_max": min(self.card.pcie_gen, 4 if self.card is A100_PCIE else 5),
            "performance_state": "P0" if self.card.nvlinks else "P8",
            "temperature": 33 + index,
            "power_w": self.card.power_w * 0.18,
        }
        own = {**resting, **self.gpu.get(index, {}), **changed}
        bus = f"00000000:{0x17 + 0x3A * index:02X}:00.0"
        return Gpu(index=index, card=self.card, uuid=self.uuid(index), bus=bus, **own)

    def pace(self, rank: int) -> Pace:
        """Of a rank; one that is not named runs as it should."""
        return self.paces[rank] if rank < len(self.paces) else Pace()

    def trains(self, rank: int) -> Pace:
        """The pace of a rank while it trains."""
        held = self.held_mhz.get(rank)
        pace = self.hot.get(rank, self.pace(rank))
        return replace(pace, clock=held / self.card.sm_mhz) if held else pace

    @property
    def training_link(self) -> float:
        """What the link between the GPUs carries while they train, bytes per second."""
        return self.busy_link_bytes_s or self.link_bytes_s


_BASES = {
    "pair": Machine(name="", profile="a100x2_pcie4", story=""),
    "single": Machine(name="", profile="h200x1", story="", card=CARDS["h200"], gpus=1),
}


def _gpu(fields: dict[str, Any]) -> dict[str, Any]:
    """What differs of one GPU."""
    return fields | {"processes": [Process(**one) for one in fields.get("processes", ())]}


_READ = {
    "stopped_by": lambda text: tuple(text.split()),
    "card": CARDS.__getitem__,
    "driver": DRIVERS.__getitem__,
    "paces": lambda paces: tuple(Pace(**one) for one in paces),
    "hot": lambda paces: {rank: Pace(**one) for rank, one in paces.items()},
    "ending": lambda fields: Ending(**fields),
    "gpu": lambda gpus: {index: _gpu(one) for index, one in gpus.items()},
}


def _machine(item: dict[str, Any]) -> Machine:
    """One machine. Raises TypeError or KeyError where the file says what there is not."""
    base = _BASES[item.pop("of")]
    return replace(base, **{name: _READ.get(name, lambda v: v)(v) for name, v in item.items()})


MACHINES = tuple(
    _machine(item)
    for item in yaml.safe_load(Path(__file__).with_name("machines.yaml").read_text("utf-8"))
)
SICK = tuple(machine for machine in MACHINES if machine.stopped_by)
# Not sick, but the answer of a comparison is another one, and the machine may go.
OTHER_ANSWERS = tuple(one for one in MACHINES if one.name == "fused_slower")
HEALTHY = tuple(one for one in MACHINES if one not in (*SICK, *OTHER_ANSWERS))
