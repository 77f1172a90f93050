"""What an H200 said of itself is read as that of a healthy card, and finds its profile."""

from __future__ import annotations

from nsa.attention.triton.launch import file_of
from runbook.config.load import load_profile
from runbook.machine.gpu import profile_for
from runbook.machine.gpu.nvidia_smi import parse_nvidia_smi
from tests.real import H200, unread_fields

SMI = (H200 / "nvidia_smi.xml").read_text()


def test_it_is_the_card_of_its_profile() -> None:
    (card,) = parse_nvidia_smi(SMI).gpus
    assert unread_fields(card) == []
    name, why = profile_for([(card.name, card.link["gen_max"])])
    assert (name, why) == ("h200x1", "found 1 x NVIDIA H200")
    hardware = load_profile(name).hardware
    assert hardware is not None and hardware.gpu_name in card.name
    assert file_of(card.name).is_file(), "the cuts of its kernels were measured"
