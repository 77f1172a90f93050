"""Which profile a machine gets; nvidia-smi's XML and topology, as recorded from machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rehearsal.hardware import (
    A100_PCIE,
    CARDS,
    DRIVERS,
    Card,
    Driver,
    Gpu,
    Process,
    query_xml,
    topology,
)
from runbook.config.load import is_shipped
from runbook.errors import RunbookError, UsageError
from runbook.machine.gpu import detect_profile, profile_for
from runbook.machine.gpu.cards import NvidiaSmi, parse_nvidia_smi, parse_topology
from runbook.machine.preflight import collect_gpus, gpu_drafts, no_gpu_drafts
from runbook.records.evidence import Fact
from tests.factory.programs import first_on_path, program
from tests.factory.tables import rows, table

MIXED = [("Tesla T4", 3), ("NVIDIA H200", 5)]


def xml(*cards: tuple[str, int]) -> str:
    """What `nvidia-smi -q -x` tells of cards by their names and highest PCIe generations."""
    link = "<pci><pci_gpu_link_info><pcie_gen><max_link_gen>{}</max_link_gen></pcie_gen>"
    gpus = [
        f"<gpu><product_name>{name}</product_name>{link.format(generation)}"
        "</pci_gpu_link_info></pci></gpu>"
        for name, generation in cards
    ]
    return f"<nvidia_smi_log>{''.join(gpus)}</nvidia_smi_log>"


@table(__file__, "profiles_by_cards")
def test_profile_by_cards(card: str, generations: list[int], profile: str, reason: str) -> None:
    found, why = profile_for([(card, generation) for generation in generations])
    assert found == profile and is_shipped(found)
    assert reason in why


Trace = Callable[[Path], None]


@pytest.mark.parametrize(
    ("cards", "seen"),
    [
        ([("NVIDIA A100 80GB PCIe", 4)] * 9, "9 x NVIDIA A100"),
        ([("NVIDIA GH200 480GB", 5)], "1 x NVIDIA GH200 480GB"),
        (MIXED, "Tesla T4 + NVIDIA H200"),
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
    program(tmp_path / "nvidia-smi", f"echo '{xml(*MIXED)}'")
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


FIXTURES = Path(__file__).parent / "fixtures"


def load(name: str) -> NvidiaSmi:
    return parse_nvidia_smi((FIXTURES / f"{name}.xml").read_text(encoding="utf-8"))


def named(drafts: Iterable[Fact]) -> dict[str, Fact]:
    return {draft.name: draft for draft in drafts}


def test_topology_pairs_once_and_without_network_cards() -> None:
    text = (FIXTURES / "topo_nvlink.txt").read_text(encoding="utf-8")
    assert parse_topology(text) == {(0, 1): "NV12", (0, 2): "SYS", (1, 2): "SYS"}
    assert parse_topology((FIXTURES / "topo_a100x2.txt").read_text(encoding="utf-8")) == {
        (0, 1): "NODE"
    }
    assert parse_topology("") == {}


def test_elements_that_a_driver_lacks_are_no_value() -> None:
    smi = parse_nvidia_smi(
        "<nvidia_smi_log><gpu id='0'><product_name>NVIDIA T4</product_name></gpu></nvidia_smi_log>"
    )
    drafts = named(gpu_drafts(smi, {}))
    assert drafts["gpu.count"].value == 1
    for name in ("gpu.pcie_gen", "gpu.memory_total_mib", "gpu.ecc_uncorrected", "gpu.mig"):
        assert drafts[name].value is None, name
        assert drafts[name].note, name


def test_truncation_anywhere_never_invents_a_gpu() -> None:
    text = (FIXTURES / "a100x2_pcie4.xml").read_text(encoding="utf-8").rstrip()
    for cut in range(0, len(text) - 1, 97):
        with pytest.raises(RunbookError):
            parse_nvidia_smi(text[:cut])


def test_without_nvidia_smi_every_fact_is_there_and_says_why() -> None:
    without = no_gpu_drafts("no nvidia-smi on this machine", file="host.json", torch_count=0)
    values = {draft.name: draft.value for draft in without}
    assert values.keys() == named(gpu_drafts(load("h200x1"), {})).keys()
    assert all(draft.note for draft in without)
    assert values.pop("gpu.count") == 0
    assert set(values.values()) == {None}


def asked(folder: Path, **environment: str) -> dict[str, Fact]:
    return named(collect_gpus(folder, environment=environment, torch_count=None))


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ("echo 'no driver' >&2; exit 9", "exit code 9: no driver"),
        ("echo 'No devices were found'", "cannot be read"),
        ("echo '<html></html>'", "expected <nvidia_smi_log>"),
    ],
)
def test_a_broken_driver_is_a_reason_and_no_gpu_is_invented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, note: str
) -> None:
    first_on_path(monkeypatch, program(tmp_path / "nvidia-smi", script).parent)
    facts = asked(tmp_path)
    assert facts["gpu.count"].value is None
    assert all(note in draft.note for draft in facts.values())
    assert (tmp_path / "nvidia_smi.xml").is_file()


def test_seconds_of_reduced_clocks_are_counted_by_newer_drivers() -> None:
    text = (FIXTURES.parents[1] / "real/h100_80gb_hbm3-580.159.04/nvidia_smi.xml").read_text()
    held = parse_nvidia_smi(text).gpus[0].counters
    assert (held["power_violation_s"], held["thermal_violation_s"]) == (0, 0)
    hot = text.replace("sw_therm_slowdown>0 us<", "sw_therm_slowdown>1500000 us<")
    hot = hot.replace("hw_therm_slowdown>0 us<", "hw_therm_slowdown>250000 us<")
    assert parse_nvidia_smi(hot).gpus[0].counters["thermal_violation_s"] == 1.75
    assert load("h200x1").gpus[0].counters["thermal_violation_s"] is None


EVERY = [
    pytest.param(driver, card, id=f"{name}-{kind}")
    for name, driver in DRIVERS.items()
    for kind, card in CARDS.items()
]


def pair(card: Card, *changes: dict[str, Any]) -> list[Gpu]:
    """Two GPUs of a kind; `changes` are those of GPU 0 and of GPU 1."""
    return [
        Gpu(
            index=index, card=card, uuid=f"GPU-{index}a2b", bus=f"00000000:{0x17 + index:02X}:00.0",
            **change,
        )
        for index, change in enumerate((*changes, {}, {})[:2])
    ]  # fmt: skip


def facts_of_rehearsed_smi(driver: Driver, gpus: list[Gpu], link: str = "NODE") -> dict[str, Any]:
    found = parse_nvidia_smi(query_xml(driver, gpus))
    drafts = gpu_drafts(found, parse_topology(topology(gpus, link)))
    return {draft.name: draft.value for draft in drafts}


@pytest.mark.parametrize(("driver", "card"), EVERY)
def test_a_healthy_pair_says_what_was_meant(driver: Driver, card: Card) -> None:
    gpus = pair(card, *[{"pcie_gen_max": card.pcie_gen}] * 2)
    link = f"NV{card.nvlinks}" if card.nvlinks else "SYS"
    (same,) = rows(__file__, "healthy_pair")
    assert facts_of_rehearsed_smi(driver, gpus, link) == {
        **same,
        "gpu.names": f"{card.name}, {card.name}",
        "gpu.driver": driver.version,
        "gpu.pcie_gen_max": card.pcie_gen,
        "gpu.memory_total_mib": card.memory_mib,
        "gpu.nvlink": card.nvlinks > 0,
    }


@pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)
@table(__file__, "wrong_gpus")
def test_what_is_wrong_with_the_second_gpu_is_found(
    driver: Driver, change: dict[str, Any], fact: str, value: object
) -> None:
    told = change.get("processes", ())
    change = {**change, "processes": tuple(Process(pid=7, **one) for one in told)}
    assert facts_of_rehearsed_smi(driver, pair(A100_PCIE, {}, change))[fact] == value
