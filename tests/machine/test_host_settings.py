"""Settings of the host: read from folders made by hand, and from this very machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.machine.host_settings import collect_host_settings
from runbook.records.evidence import Fact
from tests.factory.programs import first_on_path, program


def settings(root: Path) -> dict[str, Fact]:
    return {draft.name: draft for draft in collect_host_settings("host.json", root)}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_host_that_skews_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    write(proc / "sys/kernel/numa_balancing", "1\n")
    write(proc / "cmdline", "root=/dev/sda secret=hunter2 intel_iommu=on\n")
    write(sys / "kernel/iommu_groups/0/type", "DMA-FQ\n")
    for node in ("node0", "node1"):
        write(sys / f"devices/system/node/{node}/cpulist", "0\n")
    write(sys / "devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    write(sys / "kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    write(sys / "fs/cgroup/cpu.max", "750000 100000\n")
    tool = tmp_path / "bin" / "lspci"
    program(tool, "echo '\tACSCtl: SrcValid+ TransBlk- ReqRedir+ CmpltRedir+'")
    first_on_path(monkeypatch, tool.parent)
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = settings(tmp_path)
    values = {name.removeprefix("host."): draft.value for name, draft in found.items()}
    assert values["numa_balancing"] is True and values["iommu_translates"] is True
    assert values["acs_redirects"] is True and values["cpu_governor"] == "powersave"
    assert values["hugepages"] == "never" and values["cpu_quota"] == 7.5
    assert "hunter2" not in str(found) and "intel_iommu=on" in found["host.iommu_translates"].note


def test_what_is_not_there_has_no_value_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = settings(tmp_path / "nowhere")
    for name in ("numa_balancing", "iommu_translates", "shm_gib", "shm_free_gib", "hugepages"):
        draft = found[f"host.{name}"]
        assert draft.value is None and "No such file" in draft.note, name
    assert "lspci is not installed" in found["host.acs_redirects"].note
    assert found["host.cpu_quota"].value is None and "cpu.max" in found["host.cpu_quota"].note
