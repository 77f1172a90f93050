"""Counters before and after a launch: by nvidia-smi, and by nobody."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from runbook.folder.launch.documents import read_json_object
from runbook.folder.launch.shapes import DEVICE_COUNTERS, DEVICES, shaped
from runbook.machine.gpu.devices import When, write_devices
from tests.launch.nvml import nvidia_smi
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


def test_nvidia_smi_is_asked_and_its_answer_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path / "bin", monkeypatch, FIXTURES / "a100x2_pcie4.xml")
    document = written(tmp_path)
    assert (document["source"], document["problem"]) == ("nvidia-smi", "")
    first, second = document["gpus"]
    assert set(first["counters"]) == set(DEVICE_COUNTERS) and second["index"] == 1
    found = first["counters"]
    assert (found["ecc_corrected_aggregate"], found["ecc_uncorrected_aggregate"]) == (2, 7)
    assert first["power"]["limit_w"] == first["power"]["default_w"]
    assert first["sm_max_mhz"] == 1410
    assert found["remap_pending"] == 0 and found["pcie_replays"] == 0
    assert "<nvidia_smi_log>" in (tmp_path / "nvidia_smi_before.xml").read_text()
    assert written(tmp_path, When.AFTER)["gpus"] == document["gpus"]


def test_a_driver_that_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path / "bin", monkeypatch, None)
    document = written(tmp_path)
    assert document["source"] == "" and document["gpus"] == []
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


def test_a_driver_that_hangs_ends_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path / "bin", monkeypatch, FIXTURES / "a100x2_pcie4.xml")
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 30\n")
    began = time.monotonic()
    assert write_devices(tmp_path, When.AFTER, {}, hurry=True) == ()
    assert time.monotonic() - began < crowded(8)
    document = json.loads((tmp_path / "devices_after.json").read_text())
    assert "no answer within 2 s" in document["problem"] and document["source"] == ""


@pytest.mark.gpu
def test_a_real_driver_tells_its_counters(tmp_path: Path) -> None:
    document = written(tmp_path)
    assert document["source"] == "nvidia-smi"
    first = document["gpus"][0]
    assert first["counters"]["pcie_replays"] is not None and first["link"]["width"] >= 1
