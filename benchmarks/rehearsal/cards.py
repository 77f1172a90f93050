"""The cards that are rehearsed: what their data sheets and public nvidia-smi outputs say.

Sources: NVIDIA data sheets "A100 80GB" (PCIe and SXM), "H100 Tensor Core GPU", "H200 Tensor Core
GPU"; device ids from the public PCI ID list.
"""

from __future__ import annotations

from dataclasses import dataclass


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


A100_PCIE = Card(
    name="NVIDIA A100 80GB PCIe",
    architecture="Ampere",
    memory_mib=81_920,
    bf16_tflops=312.0,
    memory_gb_s=1935.0,
    masked_tflops=85.0,
    power_w=300,
    sm_mhz=1410,
    memory_mhz=1512,
    pcie_gen=4,
    nvlinks=0,
    device_id="20B510DE",
    part="20B5-895-A1",
)
A100_SXM = Card(
    name="NVIDIA A100-SXM4-80GB",
    architecture="Ampere",
    memory_mib=81_920,
    bf16_tflops=312.0,
    memory_gb_s=2039.0,
    masked_tflops=85.0,
    power_w=400,
    sm_mhz=1410,
    memory_mhz=1593,
    pcie_gen=4,
    nvlinks=12,
    device_id="20B210DE",
    part="20B2-895-A1",
)
H100_SXM = Card(
    name="NVIDIA H100 80GB HBM3",
    architecture="Hopper",
    memory_mib=81_559,
    bf16_tflops=989.0,
    memory_gb_s=3350.0,
    masked_tflops=140.0,
    power_w=700,
    sm_mhz=1980,
    memory_mhz=2619,
    pcie_gen=5,
    nvlinks=18,
    device_id="233010DE",
    part="2330-885-A1",
)
H200 = Card(
    name="NVIDIA H200",
    architecture="Hopper",
    memory_mib=143_771,
    bf16_tflops=989.0,
    memory_gb_s=4800.0,
    masked_tflops=140.0,
    power_w=700,
    sm_mhz=1980,
    memory_mhz=3201,
    pcie_gen=5,
    nvlinks=18,
    device_id="233510DE",
    part="2335-885-A1",
)
CARDS = {"a100_pcie": A100_PCIE, "a100_sxm": A100_SXM, "h100_sxm": H100_SXM, "h200": H200}
