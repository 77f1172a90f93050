"""Which profile a machine gets, that the reason is told, and that GPUs are never passed over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runbook.config import profile_names
from runbook.engine import RunOptions, plan_all
from runbook.errors import UsageError
from runbook.machine.detect import detect_profile, profile_for

REPOSITORY = Path(__file__).resolve().parents[2]


A100 = ("NVIDIA A100 80GB PCIe", 4)
H200 = ("NVIDIA H200", 5)
T4 = ("Tesla T4", 3)


@pytest.mark.parametrize(
    ("cards", "profile", "reason"),
    [
        ([A100] * 2, "a100x2_pcie4", "2 x NVIDIA A100 80GB PCIe"),
        ([(A100[0], 3)] * 2, "a100x2_pcie3", "generation 3"),
        ([A100, (A100[0], 3)], "a100x2_pcie3", "generation 3/4"),
        ([H200], "h200x1", "1 x NVIDIA H200"),
        ([H200] * 2, "h200x2_nvlink", "2 x NVIDIA H200"),
        ([("NVIDIA H100 80GB HBM3", 5)], "h100x1", "1 x NVIDIA H100"),
        ([("NVIDIA H100 80GB HBM3", 5)] * 2, "h100x2_nvlink", "2 x NVIDIA H100"),
        ([("NVIDIA A100-SXM4-80GB", 4)] * 2, "a100x2_nvlink", "2 x NVIDIA A100-SXM4-80GB"),
        ([("NVIDIA A100-SXM4-80GB", 4)], "a100x1", "1 x NVIDIA A100"),
        ([A100], "a100x1", "1 x NVIDIA A100 80GB PCIe"),
    ],
)
def test_profile_by_cards(cards: list[tuple[str, int]], profile: str, reason: str) -> None:
    found, why = profile_for(cards)
    assert found == profile and found in profile_names()
    assert reason in why


Trace = Callable[[Path], None]


def fake(folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)


def listed(*cards: tuple[str, int]) -> str:
    """A script that prints the XML of these cards."""
    gpus = "".join(
        f"<gpu><product_name>{name}</product_name><uuid>GPU-{number}</uuid><pci><pci_gpu_link_info>"
        f"<pcie_gen><max_link_gen>{generation}</max_link_gen></pcie_gen>"
        "</pci_gpu_link_info></pci></gpu>"
        for number, (name, generation) in enumerate(cards)
    )
    return f"echo '<nvidia_smi_log>{gpus}</nvidia_smi_log>'"


@pytest.mark.parametrize(
    ("cards", "seen"),
    [
        ([A100] * 4, "4 x NVIDIA A100"),
        ([("NVIDIA A100-SXM4-40GB", 4)] * 2, "2 x NVIDIA A100-SXM4-40GB"),
        ([("NVIDIA H100 PCIe", 5)], "1 x NVIDIA H100 PCIe"),
        ([H200, ("NVIDIA H100 80GB HBM3", 5)], "NVIDIA H200 + NVIDIA H100"),
        ([T4], "1 x Tesla T4"),
        ([T4, H200], "Tesla T4 + NVIDIA H200"),
    ],
)
def test_cards_without_a_profile_are_refused_and_never_cpu(
    cards: list[tuple[str, int]], seen: str
) -> None:
    with pytest.raises(UsageError, match="--profile cpu") as caught:
        profile_for(cards)
    assert seen in str(caught.value)


def pci(root: Path, *, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    folder = root / "sys/bus/pci/devices/0000:17:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n", encoding="utf-8")
    (folder / "class").write_text(f"{kind}\n", encoding="utf-8")


def node(root: Path) -> None:
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()


def driver(root: Path) -> None:
    (root / "proc/driver/nvidia").mkdir(parents=True)


@pytest.mark.parametrize(
    ("trace", "seen"),
    [(pci, "PCI 0000:17:00.0"), (node, "/dev/nvidia0"), (driver, "/proc/driver/nvidia")],
)
@pytest.mark.parametrize("script", [None, "true", listed(), "echo 'no version' >&2; exit 9"])
def test_a_device_whose_driver_does_not_answer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: Trace, seen: str, script: str | None
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    if script is not None:
        fake(tmp_path / "bin", script)
    trace(tmp_path)
    with pytest.raises(UsageError, match="--profile auto: this machine has an NVIDIA") as caught:
        detect_profile(tmp_path)
    assert seen in str(caught.value)


@pytest.mark.parametrize(
    "other", [{"vendor": "0x1002"}, {"vendor": "0x8086"}, {"kind": "0x040300"}], ids=str
)
def test_other_devices_are_no_gpu_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, str]
) -> None:
    """Another maker's card, and the sound function of an NVIDIA card."""
    monkeypatch.setenv("PATH", str(tmp_path))
    pci(tmp_path, **other)
    assert detect_profile(tmp_path)[0] == "cpu"


def test_the_program_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    name, reason = detect_profile(tmp_path)
    assert name == "cpu" and "no NVIDIA device is seen" in reason
    fake(tmp_path, listed(H200))
    assert detect_profile(tmp_path) == ("h200x1", "found 1 x NVIDIA H200")
    fake(tmp_path, "echo 'driver mismatch' >&2; exit 9")
    with pytest.raises(UsageError, match="nvidia-smi ended with 9: driver mismatch"):
        detect_profile(tmp_path)


def test_only_visible_cards_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fake(tmp_path, listed(T4, H200))
    for visible in ("1", "GPU-1", "1,7"):  # as CUDA reads it: nothing behind an invalid entry
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert detect_profile(tmp_path)[0] == "h200x1"
    for visible in ("7", "1,1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(UsageError, match=f"CUDA_VISIBLE_DEVICES={visible} hides all 2 GPUs"):
            detect_profile(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES is empty"):
        detect_profile(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UsageError, match="Tesla T4"):
        detect_profile(tmp_path)


def test_the_nightly_asks_for_a_gpu_profile() -> None:
    text = (REPOSITORY / ".github/workflows/nightly-gpu.yml").read_text(encoding="utf-8")
    assert "'auto'" not in text and "default: auto" not in text
    assert "default: a100x2_pcie4" in text and 'auto|cpu|""' in text


def test_a_run_on_an_unknown_card_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fake(tmp_path, listed(T4))
    with pytest.raises(UsageError, match="1 x Tesla T4"):
        plan_all(RunOptions(out=tmp_path))
    assert plan_all(RunOptions(out=tmp_path, profile="cpu")), "asked for by name, it is taken"
