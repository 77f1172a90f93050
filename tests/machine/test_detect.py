"""Which profile a machine gets, that the reason is told, and that GPUs are never passed over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runbook.config.load import is_shipped
from runbook.errors import UsageError
from runbook.machine.gpu import detect_profile, profile_for
from tests.factory.programs import program
from tests.factory.tables import table

A100 = "NVIDIA A100 80GB PCIe, 4\n"


def cards(listing: str) -> list[tuple[str, int]]:
    """A line for each card: its name and highest PCIe generation."""
    rows = (line.rsplit(", ", 1) for line in listing.splitlines())
    return [(name, int(generation)) for name, generation in rows]


def xml(listing: str) -> str:
    """The same as `nvidia-smi -q -x` tells it."""
    link = "<pci><pci_gpu_link_info><pcie_gen><max_link_gen>{}</max_link_gen></pcie_gen>"
    gpus = [
        f"<gpu><product_name>{name}</product_name>{link.format(generation)}"
        "</pci_gpu_link_info></pci></gpu>"
        for name, generation in cards(listing)
    ]
    return f"<nvidia_smi_log>{''.join(gpus)}</nvidia_smi_log>"


@table(__file__, "profiles_by_cards")
def test_profile_by_cards(card: str, generations: list[int], profile: str, reason: str) -> None:
    found, why = profile_for([(card, generation) for generation in generations])
    assert found == profile and is_shipped(found)
    assert reason in why


Trace = Callable[[Path], None]


def lists(folder: Path, listing: str) -> None:
    program(folder / "nvidia-smi", f"echo '{xml(listing)}'")


@pytest.mark.parametrize(
    ("listing", "seen"),
    [
        (A100 * 9, "9 x NVIDIA A100"),
        ("NVIDIA GH200 480GB, 5\n", "1 x NVIDIA GH200 480GB"),
        ("Tesla T4, 3\nNVIDIA H200, 5\n", "Tesla T4 + NVIDIA H200"),
    ],
)
def test_cards_without_a_profile_are_refused_and_never_cpu(listing: str, seen: str) -> None:
    with pytest.raises(UsageError, match="--profile cpu") as caught:
        profile_for(cards(listing))
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
@pytest.mark.parametrize("script", [None, "true", "echo 'no version' >&2; exit 9"])
def test_a_device_whose_driver_does_not_answer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: Trace, seen: str, script: str | None
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    if script is not None:
        program(tmp_path / "bin/nvidia-smi", script)
    trace(tmp_path)
    with pytest.raises(UsageError, match="--profile auto: this machine has an NVIDIA") as caught:
        detect_profile(tmp_path)
    assert seen in str(caught.value)


@pytest.mark.parametrize("other", [{"vendor": "0x1002"}, {"kind": "0x040300"}], ids=str)
def test_other_devices_are_no_gpu_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, str]
) -> None:
    """Another maker's card, and the sound function of an NVIDIA card."""
    monkeypatch.setenv("PATH", str(tmp_path))
    pci(tmp_path, **other)
    assert detect_profile(tmp_path)[0] == "cpu"


def test_only_visible_cards_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA reads the variable: nothing counts from the first entry on that is no GPU."""
    monkeypatch.setenv("PATH", str(tmp_path))
    lists(tmp_path, "Tesla T4, 3\nNVIDIA H200, 5\n")
    for named in ("1", "1,-1,0", " 1 "):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert detect_profile(tmp_path)[0] == "h200x1", named
    for named in ("", "-1,1", "7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        with pytest.raises(UsageError, match=f"CUDA_VISIBLE_DEVICES={named} hides all GPUs"):
            detect_profile(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UsageError, match="Tesla T4"):
        detect_profile(tmp_path)
