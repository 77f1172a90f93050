"""nvidia-smi's output in the shapes of five drivers and four cards, against what is read from it.

The documents come from the generator of the rehearsal, which was written from NVIDIA's manual and
knows nothing of the readers: what it meant has to be what they find.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.rehearsal import smi
from benchmarks.rehearsal.hardware import A100_PCIE, CARDS, DRIVERS, Card, Driver, Gpu, Process
from runbook.machine.gpu.facts import gpu_drafts
from runbook.machine.gpu.nvidia_smi import parse_nvidia_smi, parse_topology

EVERY = [
    pytest.param(driver, card, id=f"{name}-{kind}")
    for name, driver in DRIVERS.items()
    for kind, card in CARDS.items()
]


def pair(card: Card, *changes: dict[str, Any]) -> list[Gpu]:
    """Two GPUs of a kind; `changes` are those of GPU 0 and of GPU 1."""
    return [
        Gpu(
            index=index, card=card, uuid=f"GPU-{index}a2b", bus=f"00000000:{0x17 + index:02X}:00.0",
            **change,
        )
        for index, change in enumerate((*changes, {}, {})[:2])
    ]  # fmt: skip


def facts(driver: Driver, gpus: list[Gpu], link: str = "NODE") -> dict[str, Any]:
    found = parse_nvidia_smi(smi.query_xml(driver, gpus))
    drafts = gpu_drafts(found, parse_topology(smi.topology(gpus, link)))
    return {draft.name: draft.value for draft in drafts}


@pytest.mark.parametrize(("driver", "card"), EVERY)
def test_a_healthy_pair_says_what_was_meant(driver: Driver, card: Card) -> None:
    gpus = pair(card, *[{"pcie_gen_max": card.pcie_gen, "performance_state": "P8"}] * 2)
    link = f"NV{card.nvlinks}" if card.nvlinks else "SYS"
    assert facts(driver, gpus, link) == {
        "gpu.count": 2,
        "gpu.installed": 2,
        "gpu.names": f"{card.name}, {card.name}",
        "gpu.driver": driver.version,
        "gpu.pcie_gen": 1,
        "gpu.pcie_gen_max": card.pcie_gen,
        "gpu.pcie_width": 16,
        "gpu.pcie_width_max": 16,
        "gpu.link_idle": True,
        "gpu.processes": 0,
        "gpu.memory_used_mib": 4,
        "gpu.memory_total_mib": card.memory_mib,
        "gpu.nvlink": card.nvlinks > 0,
        "gpu.ecc_uncorrected": 0,
        "gpu.remap_pending": False,
        "gpu.remap_failure": False,
        "gpu.throttle": "",
        "gpu.caps": "",
        "gpu.power_limit": 1.0,
        "gpu.mig": False,
    }


FAULTS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "bytes of memory": ({"dram_uncorrectable": 3}, "gpu.ecc_uncorrected", 3),
    "parity of the SRAM": ({"sram_parity": 1}, "gpu.ecc_uncorrected", 1),
    "SEC-DED of the SRAM": ({"sram_secded": 2}, "gpu.ecc_uncorrected", 2),
    "all three": (
        {"sram_secded": 2, "sram_parity": 1, "dram_uncorrectable": 4}, "gpu.ecc_uncorrected", 7,
    ),
    "corrected only": ({"dram_correctable": 9}, "gpu.ecc_uncorrected", 0),
    "remap pending": ({"remap_pending": True}, "gpu.remap_pending", True),
    "remap failed": ({"remap_failure": True}, "gpu.remap_failure", True),
    "MIG": ({"mig": True}, "gpu.mig", True),
    "eight lanes": ({"pcie_width": 8}, "gpu.pcie_width", 8),
    "memory in use": ({"used_mib": 40_000}, "gpu.memory_used_mib", 40_000),
    "heat": ({"reasons": ("hw_thermal_slowdown",)}, "gpu.throttle",
             "GPU 1: hardware thermal slowdown"),
    "power brake": ({"reasons": ("hw_power_brake_slowdown",)}, "gpu.throttle",
                    "GPU 1: power brake"),
    "power cap": ({"reasons": ("sw_power_cap",)}, "gpu.caps", "GPU 1: power cap"),
    "held down": ({"power_limit_w": 225.0}, "gpu.power_limit", 0.75),
    "a tenant": ({"processes": (Process(pid=7, name="x", used_mib=9),)}, "gpu.processes", 1),
    "a desktop": (
        {"processes": (Process(pid=7, name="Xorg", used_mib=9, kind="G"),)},
        "gpu.processes", 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_the_second_gpu_is_found(driver: Driver, fault: str) -> None:
    change, fact, value = FAULTS[fault]
    assert facts(driver, pair(A100_PCIE, {}, change))[fact] == value
