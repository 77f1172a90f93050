"""nvidia-smi's XML and topology, as recorded from machines of four kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.errors import RunbookError
from runbook.machine.gpu.facts import collect_gpus, gpu_drafts, no_gpu_drafts
from runbook.machine.gpu.nvidia_smi import NvidiaSmi, parse_nvidia_smi, parse_topology
from runbook.records.evidence import Fact
from tests.factory.programs import first_on_path, program

FIXTURES = Path(__file__).parent / "fixtures"


def load(name: str) -> NvidiaSmi:
    return parse_nvidia_smi((FIXTURES / f"{name}.xml").read_text(encoding="utf-8"))


def facts(name: str, topology: str = "topo_a100x2") -> dict[str, Fact]:
    links = parse_topology((FIXTURES / f"{topology}.txt").read_text(encoding="utf-8"))
    return {draft.name: draft for draft in gpu_drafts(load(name), links)}


def test_the_worse_of_two_links_speaks_and_the_note_names_both() -> None:
    found = facts("a100x2_gen3_degraded")
    assert found["gpu.pcie_gen"].value == 3
    assert found["gpu.pcie_gen"].note == "GPU 0: 4, GPU 1: 3"
    assert found["gpu.pcie_gen_max"].value == 4
    assert found["gpu.pcie_width"].value == 8
    assert found["gpu.pcie_width"].note == "GPU 0: 16, GPU 1: 8"
    assert found["gpu.link_idle"].value is False


def test_topology_pairs_once_and_without_network_cards() -> None:
    text = (FIXTURES / "topo_nvlink.txt").read_text(encoding="utf-8")
    assert parse_topology(text) == {(0, 1): "NV12", (0, 2): "SYS", (1, 2): "SYS"}
    assert parse_topology((FIXTURES / "topo_a100x2.txt").read_text(encoding="utf-8")) == {
        (0, 1): "NODE"
    }
    assert parse_topology("") == {}


def test_unknown_topology_is_no_value_and_never_no_nvlink() -> None:
    drafts = gpu_drafts(load("a100x2_pcie4"), {}, topology_problem="nvidia-smi: exit code 3")
    nvlink = next(draft for draft in drafts if draft.name == "gpu.nvlink")
    assert nvlink.value is None
    assert nvlink.note == "nvidia-smi: exit code 3"


def test_elements_that_a_driver_lacks_are_no_value() -> None:
    smi = parse_nvidia_smi(
        "<nvidia_smi_log><gpu id='0'><product_name>NVIDIA T4</product_name></gpu></nvidia_smi_log>"
    )
    drafts = {draft.name: draft for draft in gpu_drafts(smi, {})}
    assert drafts["gpu.count"].value == 1
    for name in ("gpu.pcie_gen", "gpu.memory_total_mib", "gpu.ecc_uncorrected", "gpu.mig"):
        assert drafts[name].value is None, name
        assert drafts[name].note, name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("<nvidia_smi_log><gpu>", "cannot be read"),
        ("<html></html>", "expected <nvidia_smi_log>"),
        ("No devices were found", "cannot be read"),
    ],
)
def test_what_is_no_such_document_is_refused(text: str, message: str) -> None:
    with pytest.raises(RunbookError, match=message):
        parse_nvidia_smi(text)


def test_truncation_anywhere_never_invents_a_gpu() -> None:
    text = (FIXTURES / "a100x2_pcie4.xml").read_text(encoding="utf-8").rstrip()
    for cut in range(0, len(text) - 1, 97):
        with pytest.raises(RunbookError):
            parse_nvidia_smi(text[:cut])


def test_entities_are_not_expanded_without_bound() -> None:
    levels = "".join(
        f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' if n else '<!ENTITY a0 "aaaaaaaaaa">'
        for n in range(10)
    )
    body = "<nvidia_smi_log><driver_version>&a9;</driver_version></nvidia_smi_log>"
    bomb = f"<!DOCTYPE x [{levels}]>{body}"
    with pytest.raises(RunbookError):
        parse_nvidia_smi(bomb)


def test_without_nvidia_smi_every_fact_is_there_and_says_why() -> None:
    with_gpu = {draft.name for draft in gpu_drafts(load("h200x1"), {})}
    without = no_gpu_drafts("no nvidia-smi on this machine", file="host.json", torch_count=0)
    assert {draft.name for draft in without} == with_gpu
    assert all(draft.note for draft in without)
    values = {draft.name: draft.value for draft in without}
    assert values.pop("gpu.count") == 0
    assert set(values.values()) == {None}


def test_an_installed_nvidia_smi_is_asked_and_its_words_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_root := tmp_path / "run").mkdir()
    script = f'[ "$1" = topo ] && exec cat {FIXTURES}/topo_nvlink.txt\n'
    script += f"exec cat {FIXTURES}/a100x2_busy.xml"
    first_on_path(monkeypatch, program(tmp_path / "bin/nvidia-smi", script).parent)

    def asked(environment: dict[str, str]) -> dict[str, Fact]:
        drafts = collect_gpus(
            run_root, torch_count=2, torch_uuids=(), environment=environment, host_file="host.json"
        )
        return {draft.name: draft for draft in drafts}

    facts = asked({})
    assert facts["gpu.processes"].value == 1, "Xorg draws, it does not compute"
    assert facts["gpu.processes"].note == "GPU 0: pid 48211 /usr/bin/python3 49120 MiB"
    assert facts["gpu.nvlink"].value is True
    assert {draft.path for draft in facts.values()} == {"nvidia_smi.xml", "nvidia_topo.txt"}
    kept = (run_root / "nvidia_smi.xml").read_text(encoding="utf-8")
    assert parse_nvidia_smi(kept) == load("a100x2_busy")
    other = asked({"CUDA_VISIBLE_DEVICES": "1"})
    assert other["gpu.processes"].value == 0, "the variable of a launch decides"


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ("echo 'no driver' >&2; exit 9", "exit code 9: no driver"),
        ("echo 'No devices were found'", "cannot be read"),
    ],
)
def test_a_broken_driver_is_a_reason_and_no_gpu_is_invented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, note: str
) -> None:
    first_on_path(monkeypatch, program(tmp_path / "nvidia-smi", script).parent)
    facts = {
        draft.name: draft
        for draft in collect_gpus(
            tmp_path, torch_count=None, torch_uuids=(), environment={}, host_file="host.json"
        )
    }
    assert facts["gpu.count"].value is None
    assert all(note in draft.note for draft in facts.values())
    assert (tmp_path / "nvidia_smi.xml").is_file()
