"""What nvidia-smi says, as facts; without it every fact is there and says why it has no value."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from runbook.collect.nvidia import GpuState, NvidiaSmi, parse_nvidia_smi, parse_topology
from runbook.collect.probe import Draft, run_tool
from runbook.errors import RunbookError
from runbook.read.redact import redact_text

_XML = "nvidia_smi.xml"
_TOPOLOGY = "nvidia_topo.txt"
_TIMEOUT_S = 60.0
_UNITS = {"gpu.memory_used_mib": "MiB", "gpu.memory_total_mib": "MiB"}
_NAMES = (
    "gpu.count",
    "gpu.names",
    "gpu.driver",
    "gpu.pcie_gen",
    "gpu.pcie_gen_max",
    "gpu.pcie_width",
    "gpu.pcie_width_max",
    "gpu.link_idle",
    "gpu.processes",
    "gpu.memory_used_mib",
    "gpu.memory_total_mib",
    "gpu.nvlink",
    "gpu.ecc_uncorrected",
    "gpu.remap_pending",
    "gpu.throttle",
    "gpu.mig",
)


def collect_gpus(run_root: Path, *, torch_count: int | None, host_file: str) -> list[Draft]:
    """Write nvidia_smi.xml and nvidia_topo.txt where there is an nvidia-smi; return the facts.

    `torch_count` is torch's number of devices; without nvidia-smi it is the number of GPUs.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        note = "no nvidia-smi on this machine"
        return no_gpu_drafts(note, file=host_file, torch_count=torch_count)
    listing = run_tool([program, "-q", "-x"], timeout_s=_TIMEOUT_S)
    (run_root / _XML).write_text(redact_text(listing.stdout), encoding="utf-8")
    if not listing.ok:
        return no_gpu_drafts(listing.problem, file=_XML, torch_count=torch_count)
    try:
        smi = parse_nvidia_smi(listing.stdout)
    except RunbookError as error:
        return no_gpu_drafts(str(error), file=_XML, torch_count=torch_count)
    topology = run_tool([program, "topo", "-m"], timeout_s=_TIMEOUT_S)
    (run_root / _TOPOLOGY).write_text(topology.stdout or topology.problem, encoding="utf-8")
    return gpu_drafts(smi, parse_topology(topology.stdout), topology_problem=topology.problem)


def no_gpu_drafts(note: str, *, file: str, torch_count: int | None) -> list[Draft]:
    """The same facts without values; the count is torch's, if torch could be asked."""
    drafts = [Draft(name=name, value=None, file=file, note=note) for name in _NAMES]
    if torch_count is not None:
        drafts[0] = Draft(
            name="gpu.count", value=torch_count, file=file, note=f"{note}; torch's own count"
        )
    return drafts


def gpu_drafts(
    smi: NvidiaSmi, links: Mapping[tuple[int, int], str], *, topology_problem: str = ""
) -> list[Draft]:
    """Facts of a machine with an nvidia-smi. Of several GPUs the worst one speaks."""
    gpus = smi.gpus
    return [
        _fact("gpu.count", len(gpus)),
        _fact("gpu.names", ", ".join(gpu.name for gpu in gpus)),
        _fact("gpu.driver", smi.driver, note=f"CUDA {smi.cuda}" if smi.cuda else ""),
        _worst("gpu.pcie_gen", gpus, lambda gpu: gpu.pcie_gen, min),
        _worst("gpu.pcie_gen_max", gpus, lambda gpu: gpu.pcie_gen_max, min),
        _worst("gpu.pcie_width", gpus, lambda gpu: gpu.pcie_width, min),
        _worst("gpu.pcie_width_max", gpus, lambda gpu: gpu.pcie_width_max, min),
        _any("gpu.link_idle", gpus, lambda gpu: gpu.link_idle),
        _processes(gpus),
        _worst("gpu.memory_used_mib", gpus, lambda gpu: gpu.memory_used_mib, max),
        _worst("gpu.memory_total_mib", gpus, lambda gpu: gpu.memory_total_mib, min),
        _nvlink(len(gpus), links, topology_problem),
        _worst("gpu.ecc_uncorrected", gpus, lambda gpu: gpu.ecc_uncorrected, max),
        _any("gpu.remap_pending", gpus, lambda gpu: gpu.remap_pending),
        _throttle(gpus),
        _any("gpu.mig", gpus, lambda gpu: gpu.mig),
    ]


def _fact(name: str, value: str | float | bool | None, *, note: str = "") -> Draft:
    if value is None and not note:
        note = "nvidia-smi does not say"
    return Draft(name=name, value=value, unit=_UNITS.get(name, ""), file=_XML, note=note)


def _worst(
    name: str,
    gpus: tuple[GpuState, ...],
    read: Callable[[GpuState], float | None],
    worst: Callable[[list[float]], float],
) -> Draft:
    values = {gpu.index: read(gpu) for gpu in gpus}
    known = [value for value in values.values() if value is not None]
    if len(known) < len(values) or not known:
        silent = [str(index) for index, value in values.items() if value is None]
        return _fact(name, None, note=f"nvidia-smi does not say for GPU {', '.join(silent) or '-'}")
    differ = len(set(known)) > 1
    note = ", ".join(f"GPU {index}: {value:g}" for index, value in values.items() if value)
    return _fact(name, worst(known), note=note if differ else "")


def _any(name: str, gpus: tuple[GpuState, ...], read: Callable[[GpuState], bool | None]) -> Draft:
    values = [read(gpu) for gpu in gpus]
    if any(values):
        which = [str(gpu.index) for gpu, value in zip(gpus, values, strict=True) if value]
        return _fact(name, True, note=f"GPU {', '.join(which)}")
    return _fact(name, None if not values or None in values else False)


def _processes(gpus: tuple[GpuState, ...]) -> Draft:
    busy = [(gpu, process) for gpu in gpus for process in gpu.compute_processes]
    note = "; ".join(
        f"GPU {gpu.index}: pid {process.pid} {process.name}"
        + (f" {process.used_mib:g} MiB" if process.used_mib is not None else "")
        for gpu, process in busy
    )
    return _fact("gpu.processes", len(busy), note=redact_text(note))


def _nvlink(count: int, links: Mapping[tuple[int, int], str], problem: str) -> Draft:
    pairs = ", ".join(f"GPU{a}-GPU{b} {link}" for (a, b), link in sorted(links.items()))
    if count < 2:
        return Draft(
            name="gpu.nvlink", value=False, file=_TOPOLOGY, note="one GPU: no link between GPUs"
        )
    if problem or not links:
        note = problem or "nvidia-smi topo -m lists no pair of GPUs"
        return Draft(name="gpu.nvlink", value=None, file=_TOPOLOGY, note=note)
    found = any(link.startswith("NV") for link in links.values())
    return Draft(name="gpu.nvlink", value=found, file=_TOPOLOGY, note=pairs)


def _throttle(gpus: tuple[GpuState, ...]) -> Draft:
    slowed = [f"GPU {gpu.index}: {', '.join(gpu.throttle)}" for gpu in gpus if gpu.throttle]
    return _fact("gpu.throttle", "; ".join(slowed))
