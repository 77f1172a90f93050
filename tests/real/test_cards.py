"""What an H100 and an H200 said of themselves, by every reader of a GPU, its driver and torch."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nsa.attention.triton import launch
from nsa.witness.effect_watch import kernel_name, operators_by_branch
from nsa.witness.profiling import HOST, WORK
from runbook.config.load import load_profile
from runbook.folder.launch.documents import GPU_SAMPLES, read_console
from runbook.folder.launch.rows import read_rows
from runbook.launch.incident import bundle
from runbook.launch.incident.flight import read_nccl_rows
from runbook.launch.watch import RankWatch
from runbook.machine.gpu import profile_for
from runbook.machine.gpu.cards import counted, parse_nvidia_smi, parse_topology
from runbook.machine.preflight import gpu_drafts
from runbook.records import End, LaunchResult, LaunchStatus
from tests.launch.test_flight import here
from tests.launch.test_gpu_sampler import HANGS, missing
from tests.real import H100, H200, unread_fields

SMI = (H100 / "nvidia_smi.xml").read_text()
DEVICES = json.loads((H100 / "devices_before.json").read_text())


def test_nvidia_smi_tells_everything_that_is_asked() -> None:
    smi = parse_nvidia_smi(SMI)
    (card,) = smi.gpus
    assert (smi.driver, smi.cuda, card.name) == ("580.159.04", "13.0", "NVIDIA H100 80GB HBM3")
    assert unread_fields(card) == []


def test_the_facts_of_a_healthy_card_hold_no_fault() -> None:
    links = parse_topology((H100 / "topology.txt").read_text())
    assert links == {}, "one GPU has no other"
    found = {draft.name: draft.value for draft in gpu_drafts(parse_nvidia_smi(SMI), links)}
    assert found == {
        "gpu.count": 1, "gpu.installed": 1, "gpu.names": "NVIDIA H100 80GB HBM3",
        "gpu.driver": "580.159.04", "gpu.pcie_gen": 5, "gpu.pcie_gen_max": 5, "gpu.pcie_width": 16,
        "gpu.processes": 0, "gpu.memory_used_mib": 0, "gpu.memory_total_mib": 81559,
        "gpu.nvlink": False, "gpu.ecc_uncorrected": 0, "gpu.remap_pending": False,
        "gpu.remap_failure": False, "gpu.throttle": "", "gpu.caps": "", "gpu.power_limit": 1.0,
        "gpu.mig": False,
    }  # fmt: skip


def test_the_xml_and_nvml_tell_the_same_counters() -> None:
    smi = parse_nvidia_smi(SMI)
    (by_smi,) = map(counted, smi.gpus)
    (by_nvml,) = DEVICES["gpus"]
    for name, value in by_nvml["counters"].items():
        # Times, which the two take at their own moments; pages, which this card does not retire.
        if not name.endswith("_violation_s") and not name.startswith("retired_"):
            assert by_smi["counters"][name] == value, name
    assert by_smi["link"] == by_nvml["link"] and by_smi["power"] == by_nvml["power"]
    assert (by_smi["pci"], by_smi["mig"]) == (by_nvml["pci"], by_nvml["mig"])


def test_samples_of_nvml() -> None:
    read = read_rows(H100 / "gpu_samples.csv", GPU_SAMPLES)
    assert (read.problems, read.dropped_rows, read.damaged) == ((), 0, False)
    frame = read.frame
    assert set(frame["source"]) == {"nvml"} and set(frame["uuid"]) == {DEVICES["gpus"][0]["uuid"]}
    assert frame["memory_total_mib"].eq(81559).all() and frame["pcie_gen"].eq(5).all()
    # What the driver keeps for itself is counted as used by NVML, and not by nvidia-smi.
    assert frame["memory_used_mib"].min() == 480
    assert frame["other_processes"].eq(0).all() and not frame["others"].any()
    idle = frame["throttle_reasons"] == "0x0000000000000001"
    assert frame.loc[idle, "utilization_percent"].eq(0).all() and idle.any()
    assert frame["utilization_percent"].max() > 40


@dataclass
class Nested:
    """A host event of the profiler, with what encloses it."""

    name: str
    begin: float
    end: float
    cpu_parent: Nested | None = None


def _trace() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((H100 / "trace_of_one_layer.json").read_text())
    return document


def _host_events() -> list[Nested]:
    open_: list[Nested] = []
    found = []
    for begin, end, name, kind in sorted(_trace()["events"], key=lambda row: (row[0], -row[1])):
        if kind != HOST:
            continue
        while open_ and open_[-1].end < end:
            open_.pop()
        event = Nested(name, begin, end, open_[-1] if open_ else None)
        open_.append(event)
        found.append(event)
    return found


def test_the_kernel_of_each_branch_is_the_one_that_the_device_ran() -> None:
    found = {b: kernel_name(ops) for b, ops in operators_by_branch(_host_events()).items()}
    # The window ran by torch's varlen_attn then, which nothing here calls any more.
    assert found == {"cmp": "explicit_softmax", "sel": "cudnn", "win": "none"}
    expected = load_profile("h100x1").kernels
    assert all(found[branch] in expected[branch] for branch in ("cmp", "sel"))
    on_device = [row[2] for row in _trace()["events"] if row[3] == WORK]
    assert any(name.startswith("cudnn_generated_fort_native_sdpa_sm90_flash") for name in on_device)
    assert any("pytorch_flash::flash_fwd_kernel" in name for name in on_device)
    assert sum("softmax_warp_forward" in name for name in on_device) == 1


def test_the_dump_of_nccls_own_watchdog() -> None:
    folder = H100 / "evidence" / "nccl_timeout"
    rows = read_nccl_rows((folder / "nccl_flight_rank0").read_bytes())
    assert rows == json.loads((folder / "nccl_flight_rank0.json").read_text())
    assert [row[0] for row in rows or []] == list(range(1, 13))
    assert (rows or [])[-1][1:4] == ["all_reduce", [[13231944]], ["BFloat16"]]


@pytest.mark.parametrize("name", HANGS)
def test_one_rank_that_hung_left_what_it_has_to(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(H100 / "evidence" / name, folder)
    kept = LaunchResult.model_validate_json((folder / "result.json").read_bytes())
    lines, _ = read_console(folder / "console.log")
    end = End(status=kept.status, cause=kept.cause, culprit_rank=kept.culprit_rank)
    watch = RankWatch(folder, kept.run_token, 0.0)
    told, _, _ = bundle(watch, end, console=lines, load=None, where=here)
    assert told.status is LaunchStatus.HUNG and told.cause.startswith("hang: rank 0 silent for")
    result = kept.model_copy(update={"cause": told.cause, "run_token": ""})
    assert missing(name, result, folder) == []
    if name == "nccl_timeout":
        # NCCL gave up after 9 s and said so; its process would have stayed for good.
        assert "timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE" in told.cause
        assert missing(name, kept, folder) == ["no word of NCCL's watchdog"]


H200_SMI = (H200 / "nvidia_smi.xml").read_text()


def test_it_is_the_card_of_its_profile() -> None:
    (card,) = parse_nvidia_smi(H200_SMI).gpus
    assert unread_fields(card) == []
    name, why = profile_for([(card.name, card.link["gen_max"])])
    assert (name, why) == ("h200x1", "found 1 x NVIDIA H200")
    hardware = load_profile(name).hardware
    assert hardware is not None and hardware.gpu_name in card.name
    measured = launch.measured(card.name, "9.0")
    assert measured is not None and measured["device"] == card.name
