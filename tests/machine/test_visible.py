"""Which GPUs a launch can see: by torch's UUIDs, else as CUDA reads CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runbook.machine.gpu import visible_gpus
from runbook.machine.gpu.facts import gpu_drafts
from runbook.machine.gpu.nvidia_smi import GpuState, parse_nvidia_smi, parse_topology
from tests.machine.test_nvidia import FIXTURES

SMI = parse_nvidia_smi((FIXTURES / "a100x2_pcie4.xml").read_text(encoding="utf-8"))
UUIDS = ("GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333", "GPU-cccc4444")
FOUR = tuple(
    replace(SMI.gpus[0], index=index, uuid=uuid, mig=index == 3) for index, uuid in enumerate(UUIDS)
)


def shown(text: str | None, uuids: tuple[str, ...] = (), gpus: tuple[GpuState, ...] = FOUR) -> str:
    environment = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    found = visible_gpus(gpus, environment=environment, uuids=uuids)
    return "".join(str(gpu.index) for gpu in found)


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        (None, "0123"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("1", "1"),
        ("2, 0", "02"),
        ("0,9,1", "0"),
        ("0,-1,1", "0"),
        ("1,1", ""),
        ("GPU-bbbb", "2"),
        ("GPU-aaaa", ""),
        ("GPU-aaaa1111,GPU-cccc4444", "03"),
        ("MIG-GPU-bbbb3333/1/0", "2"),
        ("MIG-0d5e1a6e-7e3c-5e0a-9d2f-3f1c5a3e2b11", "3"),
    ],
)
def test_the_variable_means_what_cuda_takes_it_for(text: str | None, indices: str) -> None:
    assert shown(text) == indices


def test_a_link_counts_between_visible_gpus_only() -> None:
    links = parse_topology((FIXTURES / "topo_nvlink.txt").read_text(encoding="utf-8"))
    three = replace(SMI, gpus=FOUR[:3])
    for pair, nvlink in (((0, 1), True), ((0, 2), False)):
        visible = [FOUR[index] for index in pair]
        drafts = {draft.name: draft for draft in gpu_drafts(three, links, visible=visible)}
        assert drafts["gpu.nvlink"].value is nvlink


def test_a_card_without_mig_is_whole_and_a_silent_driver_is_not_known() -> None:
    text = (FIXTURES / "h200x1.xml").read_text(encoding="utf-8")
    assert parse_nvidia_smi(text).gpus[0].mig is False
    for said, mig in (("N/A", False), ("Enabled", True), ("", None)):
        changed = text.replace("<current_mig>Disabled", f"<current_mig>{said}")
        assert parse_nvidia_smi(changed).gpus[0].mig is mig
