"""What real machines left, by device and driver; each folder says what was changed."""

from __future__ import annotations

from pathlib import Path

from runbook.machine.gpu.cards import GpuState

H100 = Path(__file__).parent / "h100_80gb_hbm3-580.159.04"
H200 = Path(__file__).parent / "h200-580.159.04"

# What the program reads of a card.
_READ = (
    "name", "pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max", "memory_total_mib",
    "memory_used_mib", "ecc_uncorrected_volatile", "remap_pending", "mig",
)  # fmt: skip


def unread_fields(gpu: GpuState) -> list[str]:
    """What the program would read of a card and this driver does not say."""
    link = {f"pcie_{name}": value for name, value in gpu.link.items()}
    told = {**vars(gpu), **link, **gpu.counters}
    return [name for name in _READ if told[name] in (None, "")]
