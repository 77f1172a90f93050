"""Counters from nvidia-smi's XML, in the forms that its versions have."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.folder.launch.shapes import DEVICE_COUNTERS
from runbook.machine.gpu.nvidia_smi import parse_nvidia_smi

FIXTURES = Path(__file__).parent / "fixtures"

# Before Ampere: pages are retired, errors counted by the number of bits, reasons called throttle.
VOLTA = """<nvidia_smi_log><driver_version>525.60.13</driver_version><gpu id="00000000:17:00.0">
<uuid>GPU-1</uuid><mig_mode><current_mig>N/A</current_mig></mig_mode>
<pci><replay_counter>3</replay_counter></pci>
<clocks_throttle_reasons>
<clocks_throttle_reason_hw_thermal_slowdown>Active</clocks_throttle_reason_hw_thermal_slowdown>
<clocks_throttle_reason_sw_power_cap>Active</clocks_throttle_reason_sw_power_cap>
<clocks_throttle_reason_gpu_idle>Not Active</clocks_throttle_reason_gpu_idle>
</clocks_throttle_reasons>
<ecc_errors><volatile>
<single_bit><device_memory>4</device_memory><total>5</total></single_bit>
<double_bit><device_memory>1</device_memory><total>1</total></double_bit>
</volatile></ecc_errors>
<retired_pages>
<multiple_single_bit_retirement><retired_count>2</retired_count></multiple_single_bit_retirement>
<double_bit_retirement><retired_count>1</retired_count></double_bit_retirement>
<pending_retirement>Yes</pending_retirement>
</retired_pages></gpu></nvidia_smi_log>"""


def test_the_form_before_ampere() -> None:
    smi = parse_nvidia_smi(VOLTA)
    assert smi.driver == "525.60.13"
    (gpu,) = smi.counted(smi.gpus)
    found = gpu["counters"]
    assert (found["ecc_corrected_volatile"], found["ecc_uncorrected_volatile"]) == (5, 1)
    assert (found["retired_single_bit"], found["retired_double_bit"]) == (2, 1)
    assert found["retired_pending"] == 1 and found["pcie_replays"] == 3
    assert found["ecc_corrected_aggregate"] is None and found["remap_pending"] is None
    assert gpu["clock_events"] == 0x40 | 0x4 and gpu["pci"] == "00000000:17:00.0"
    assert "ecc_corrected_aggregate" in gpu["missing"]


@pytest.mark.parametrize(
    ("name", "gpus"), [("a100x2_pcie4", 2), ("a100x2_gen3_degraded", 2), ("h200x1", 1)]
)
def test_the_newer_form(name: str, gpus: int) -> None:
    smi = parse_nvidia_smi((FIXTURES / f"{name}.xml").read_text())
    assert len(smi.gpus) == gpus
    for gpu in smi.counted(smi.gpus):
        assert set(gpu["counters"]) == set(DEVICE_COUNTERS)
        assert gpu["counters"]["ecc_uncorrected_volatile"] is not None
        assert gpu["counters"]["remap_failure"] in (0, 1) and gpu["link"]["width_max"] == 16


def test_errors_of_all_memories_are_added_up() -> None:
    text = (FIXTURES / "h200x1.xml").read_text()
    base = parse_nvidia_smi(text).gpus[0].counters["ecc_uncorrected_volatile"]
    more = text.replace("<sram_uncorrectable>0<", "<sram_uncorrectable>2<", 1)
    more = more.replace("<sram_uncorrectable_parity>0<", "<sram_uncorrectable_parity>2<", 1)
    assert more != text
    changed = parse_nvidia_smi(more).gpus[0].counters
    assert changed["ecc_uncorrected_volatile"] == base + 2
    assert changed["ecc_corrected_volatile"] == 0


def test_seconds_of_reduced_clocks_are_counted_by_newer_drivers() -> None:
    text = (FIXTURES.parents[1] / "real/h100_80gb_hbm3-580.159.04/nvidia_smi.xml").read_text()
    held = parse_nvidia_smi(text).gpus[0].counters
    assert (held["power_violation_s"], held["thermal_violation_s"]) == (0, 0)
    hot = text.replace("sw_therm_slowdown>0 us<", "sw_therm_slowdown>1500000 us<")
    hot = hot.replace("hw_therm_slowdown>0 us<", "hw_therm_slowdown>250000 us<")
    assert parse_nvidia_smi(hot).gpus[0].counters["thermal_violation_s"] == 1.75
    assert parse_nvidia_smi(VOLTA).gpus[0].counters["thermal_violation_s"] is None
