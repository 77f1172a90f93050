"""Fixtures without names that are still read by what reads the real ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runbook.machine.gpu.nvidia_smi import parse_nvidia_smi
from runbook.tools.acceptance.device import _fields_row, anonymous, main, unread_fields
from runbook.tools.acceptance.state import read_result
from tests.tools.acceptance.made import fake_smi

FIXTURES = sorted((Path(__file__).parents[2] / "machine" / "fixtures").glob("*.xml"))
UUID = "GPU-8A1b2c3d-1111-2222-3333-444455556666"
XML = f"""<nvidia_smi_log><gpu id="00000000:18:00.0"><product_name>NVIDIA H200</product_name>
<serial>1650523012345</serial><uuid>{UUID}</uuid><board_id>0x1800</board_id>
<gpu_part_number>N/A</gpu_part_number><platformInfo><chassis_serial_number>ABC-99</chassis_serial_number>
</platformInfo><process_name>/home/somebody/secret/python3</process_name></gpu></nvidia_smi_log>"""


def test_what_names_the_machine_is_gone_and_the_form_stays() -> None:
    text = anonymous(f"{XML}\nbox-17 aa:bb:cc:dd:ee:ff {UUID.lower()}", host="box-17")
    for secret in ("1650523012345", UUID, UUID.lower(), "ABC-99", "0x1800", "somebody", "box-17",
                   "aa:bb:cc:dd:ee:ff"):  # fmt: skip
        assert secret not in text
    found = re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", text)
    assert len(found) == 2 and len(set(found)) == 1  # one card is one card in every file
    assert "<gpu_part_number>N/A<" in text and ">python3<" in text
    assert "NVIDIA H200" in text


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_the_reader_sees_the_same_but_the_names(path: Path) -> None:
    text = path.read_text()
    before, after = parse_nvidia_smi(text), parse_nvidia_smi(anonymous(text))
    assert (after.driver, after.cuda, len(after.gpus)) == (
        before.driver,
        before.cuda,
        len(before.gpus),
    )
    for one, two in zip(before.gpus, after.gpus, strict=True):
        assert two.memory_total_mib == one.memory_total_mib
        assert unread_fields(two) == unread_fields(one)
        assert (two.uuid != one.uuid) == bool(one.uuid)


def test_what_a_driver_does_not_say_is_named() -> None:
    gpu = parse_nvidia_smi(XML).gpus[0]
    assert {"memory_total_mib", "mig", "pcie_gen"} <= set(unread_fields(gpu))
    assert "name" not in unread_fields(gpu)


def test_the_table_says_how_much_of_a_card_was_told() -> None:
    whole = parse_nvidia_smi((FIXTURES[0]).read_text()).gpus[0]
    assert unread_fields(whole) == []
    name, told = _fields_row(whole)
    assert (name, told) == ("fields read of GPU 0", "11 of 11")
    _, some = _fields_row(parse_nvidia_smi(XML).gpus[0])
    assert "of 11; not " in some and "memory_total_mib" in some


@pytest.mark.slow
def test_without_an_answer_the_stage_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_smi(tmp_path, "Failed to initialize NVML", code=9)["PATH"]
    monkeypatch.setenv("PATH", path)
    assert main(["--out", str(tmp_path / "out")]) == 1
    assert "nvidia_smi.xml" in str(read_result(tmp_path / "out")["problems"])
    assert main(["--out", str(tmp_path / "stand_in"), "--stand-in"]) == 0
