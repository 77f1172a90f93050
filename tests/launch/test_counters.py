"""Counters before and after a launch: by NVML, by nvidia-smi in its place, and by nobody."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from runbook.folder.launch.documents import read_json_object
from runbook.folder.launch.shapes import DEVICE_COUNTERS, DEVICES, shaped
from runbook.machine.gpu import devices as counters
from runbook.machine.gpu.devices import When, write_devices
from tests.launch.nvml import Machine, nvidia_smi
from tests.shared import crowded

FIXTURES = Path(__file__).parents[1] / "machine" / "fixtures"


def written(folder: Path, when: When = When.BEFORE, **environment: str) -> dict[str, Any]:
    write_devices(folder, when, environment)
    problems: list[str] = []
    document, _ = read_json_object(folder / f"devices_{when}.json", problems)
    assert document is not None
    fitted, more = shaped(document, DEVICES, "devices")
    assert problems + more == []
    return fitted


def test_nvml_is_asked_and_nvidia_smi_kept_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    nvidia_smi(tmp_path / "bin", monkeypatch, FIXTURES / "a100x2_pcie4.xml")
    document = written(tmp_path)
    assert (document["source"], document["problem"]) == ("nvml", "")
    assert document["driver"] == "580.95.05"
    first, second = document["gpus"]
    assert (first["uuid"], first["pci"], first["mig"]) == ("GPU-0", "00000000:17:00.0", False)
    assert set(first["counters"]) == set(DEVICE_COUNTERS)
    assert first["counters"]["ecc_uncorrected_aggregate"] == 7
    assert first["counters"]["thermal_violation_s"] == 1.5
    assert first["counters"]["retired_pending"] is None
    assert first["missing"]["retired_pending"] == "Not Supported"
    assert first["link"] == {"gen": 4, "gen_max": 4, "width": 16, "width_max": 16}
    assert first["power"] == {"limit_w": 300.0, "default_w": 300.0}
    assert first["sm_max_mhz"] == 1410
    assert first["clock_events"] == 4  # by the spelling of an older driver
    assert second["index"] == 1
    assert "<nvidia_smi_log>" in (tmp_path / "nvidia_smi_before.xml").read_text()
    machine.say(uncorrected=2, replays=5, limit=220500)
    later = written(tmp_path, When.AFTER)["gpus"][0]
    after = later["counters"]
    assert later["power"] == {"limit_w": 220.5, "default_w": 300.0}
    assert (after["ecc_uncorrected_volatile"], after["pcie_replays"]) == (2, 5)


def test_a_lost_gpu_is_told_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(tmp_path, monkeypatch).say(lost=0)
    first, second = written(tmp_path)["gpus"]
    assert first["index"] == 0 and first["problem"] and second["counters"]["pcie_replays"] == 0


def test_without_nvml_the_xml_is_read_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path / "bin", monkeypatch, FIXTURES / "a100x2_pcie4.xml")
    document = written(tmp_path)
    assert document["source"] == "nvidia-smi"
    assert document["problem"] == "no NVIDIA driver: libnvidia-ml.so.1 is not installed"
    found = document["gpus"][0]["counters"]
    assert (found["ecc_corrected_aggregate"], found["ecc_uncorrected_aggregate"]) == (2, 7)
    assert document["gpus"][0]["power"]["limit_w"] == document["gpus"][0]["power"]["default_w"]
    assert document["gpus"][0]["sm_max_mhz"] == 1410
    assert found["remap_pending"] == 0 and found["pcie_replays"] == 0


def test_a_driver_that_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(tmp_path, monkeypatch).say(init=9)
    nvidia_smi(tmp_path / "bin", monkeypatch, None)
    document = written(tmp_path)
    assert document["source"] == "" and document["gpus"] == []
    assert "NVML: Driver Not Loaded" in document["problem"]
    assert "NVIDIA-SMI has failed" in document["problem"]


@pytest.mark.parametrize("text", ["<nvidia_smi_log>", "<other/>", ""])
def test_an_xml_that_cannot_be_read_is_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    broken = tmp_path / "broken.xml"
    broken.write_text(text)
    nvidia_smi(tmp_path / "bin", monkeypatch, broken)
    document = written(tmp_path)
    assert document["source"] == "" and "nvidia-smi" in document["problem"]


def test_a_library_that_hangs_ends_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(tmp_path, monkeypatch)
    monkeypatch.setattr(counters, "NVML_PROGRAM", ("/bin/sh", "-c", "sleep 30"))
    began = time.monotonic()
    write_devices(tmp_path, When.AFTER, {}, hurry=True)
    assert time.monotonic() - began < crowded(6)
    document = json.loads((tmp_path / "devices_after.json").read_text())
    assert "no answer within 1 s" in document["problem"] and document["source"] == ""


@pytest.mark.gpu
def test_a_real_driver_tells_its_counters(tmp_path: Path) -> None:
    document = written(tmp_path)
    assert document["source"] == "nvml"
    first = document["gpus"][0]
    assert first["counters"]["pcie_replays"] is not None and first["link"]["width"] >= 1
