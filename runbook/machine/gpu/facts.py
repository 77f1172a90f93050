"""What nvidia-smi says, as facts; without it every fact is there and says why it has no value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nsa.torch_env import VISIBLE_DEVICES
from runbook.folder.facts import redact_text
from runbook.machine.gpu import find_nvidia_smi, visible_gpus
from runbook.machine.gpu.nvidia_smi import GpuState, NvidiaSmi, parse_topology, read_nvidia_smi
from runbook.process import run_tool
from runbook.records.evidence import Fact

_XML = "nvidia_smi.xml"
_TOPOLOGY = "nvidia_topo.txt"
_TIMEOUT_S = 60.0
_Read = Callable[[str, NvidiaSmi], Fact]
_UNITS = {"gpu.memory_used_mib": "MiB", "gpu.memory_total_mib": "MiB"}


def collect_gpus(
    run_root: Path,
    *,
    torch_count: int | None,
    torch_uuids: Sequence[str],
    environment: Mapping[str, str],
    host_file: str,
) -> list[Fact]:
    """Write nvidia_smi.xml and nvidia_topo.txt where there is an nvidia-smi; return the facts.

    The files tell of all GPUs, the facts of those that a launch in `environment` can see.
    `torch_count` is torch's number of devices; without nvidia-smi it is the number of GPUs.
    """
    program = find_nvidia_smi()
    if program is None:
        note = "no nvidia-smi on this machine"
        return no_gpu_drafts(note, file=host_file, torch_count=torch_count)
    smi, xml, problem = read_nvidia_smi(program, within_s=_TIMEOUT_S)
    (run_root / _XML).write_text(redact_text(xml), encoding="utf-8")
    if smi is None:
        return no_gpu_drafts(problem, file=_XML, torch_count=torch_count)
    topology = run_tool([program, "topo", "-m"], timeout_s=_TIMEOUT_S)
    (run_root / _TOPOLOGY).write_text(topology.stdout or topology.problem, encoding="utf-8")
    shown = visible_gpus(smi.gpus, environment=environment, uuids=torch_uuids)
    chosen = environment.get(VISIBLE_DEVICES)
    return gpu_drafts(
        smi,
        parse_topology(topology.stdout),
        topology_problem=topology.problem,
        visible=shown,
        chosen_by="" if chosen is None else f"{VISIBLE_DEVICES}={chosen}",
    )


def no_gpu_drafts(note: str, *, file: str, torch_count: int | None) -> list[Fact]:
    """The same facts without values; the count is torch's, if torch could be asked."""
    drafts = [Fact(name=name, value=None, path=file, note=note) for name in ("gpu.count", *_FACTS)]
    if torch_count is not None:
        counted = f"{note}; torch's own count"
        drafts[0] = Fact(name="gpu.count", value=torch_count, path=file, note=counted)
    return drafts


def gpu_drafts(
    smi: NvidiaSmi,
    links: Mapping[tuple[int, int], str],
    *,
    topology_problem: str = "",
    visible: Sequence[GpuState] | None = None,
    chosen_by: str = "",
) -> list[Fact]:
    """Facts of a machine with an nvidia-smi: of the visible GPUs (all if None) the worst speaks.

    `chosen_by` says what hides the others.
    """
    shown = smi.gpus if visible is None else tuple(visible)
    indices = ", ".join(str(gpu.index) for gpu in shown) or "none"
    hidden = len(shown) < len(smi.gpus)
    why = (
        f"GPU {indices} of {len(smi.gpus)}, {chosen_by or 'all that torch sees'}" if hidden else ""
    )
    told = {
        "gpu.installed": _fact("gpu.installed", len(smi.gpus)),
        "gpu.nvlink": _nvlink([gpu.index for gpu in shown], links, topology_problem),
    }
    seen = replace(smi, gpus=shown)
    told |= {name: read(name, seen) for name, read in _FACTS.items() if read is not None}
    return [_fact("gpu.count", len(shown), note=why), *(told[name] for name in _FACTS)]


def _fact(name: str, value: str | float | bool | None, *, note: str = "") -> Fact:
    if value is None and not note:
        note = "nvidia-smi does not say"
    return Fact(name=name, value=value, unit=_UNITS.get(name, ""), path=_XML, note=note)


def _worst(
    read: Callable[[GpuState], float | None], worst: Callable[[list[float]], float]
) -> _Read:
    def draft(name: str, smi: NvidiaSmi) -> Fact:
        values = {gpu.index: read(gpu) for gpu in smi.gpus}
        known = [value for value in values.values() if value is not None]
        if len(known) < len(values) or not known:
            silent = ", ".join(str(index) for index, value in values.items() if value is None)
            return _fact(name, None, note=f"nvidia-smi does not say for GPU {silent or '-'}")
        note = ", ".join(f"GPU {index}: {value:g}" for index, value in values.items() if value)
        return _fact(name, worst(known), note=note if len(set(known)) > 1 else "")

    return draft


def _any(read: Callable[[GpuState], float | None]) -> _Read:
    def draft(name: str, smi: NvidiaSmi) -> Fact:
        values = {gpu.index: read(gpu) for gpu in smi.gpus}
        if yes := [str(index) for index, value in values.items() if value]:
            return _fact(name, True, note=f"GPU {', '.join(yes)}")
        return _fact(name, None if not values or None in values.values() else False)

    return draft


def _processes(name: str, smi: NvidiaSmi) -> Fact:
    busy = [(gpu, process) for gpu in smi.gpus for process in gpu.compute_processes]
    note = "; ".join(
        f"GPU {gpu.index}: pid {process.pid} {process.name}"
        + (f" {process.used_mib:g} MiB" if process.used_mib is not None else "")
        for gpu, process in busy
    )
    return _fact(name, len(busy), note=redact_text(note))


def _reasons(read: Callable[[GpuState], tuple[str, ...]]) -> _Read:
    def draft(name: str, smi: NvidiaSmi) -> Fact:
        found = [f"GPU {gpu.index}: {', '.join(read(gpu))}" for gpu in smi.gpus if read(gpu)]
        return _fact(name, "; ".join(found))

    return draft


def _power_limit(name: str, smi: NvidiaSmi) -> Fact:
    """Of the GPU that is held down most: its power limit over the one that it is sold with."""
    shares, told = [], []
    for gpu in smi.gpus:
        limit, default = gpu.power["limit_w"], gpu.power["default_w"]
        if not limit or not default:
            return _fact(name, None, note=f"nvidia-smi does not say for GPU {gpu.index}")
        shares.append(limit / default)
        told.append(f"GPU {gpu.index}: {limit:g} of {default:g} W")
    return _fact(name, min(shares, default=None), note="; ".join(told))


def _nvlink(shown: Sequence[int], every: Mapping[tuple[int, int], str], problem: str) -> Fact:
    links = {pair: link for pair, link in every.items() if set(pair) <= set(shown)}
    if len(shown) < 2:
        value, note = False, "one GPU: no link between GPUs"
    elif problem or not links:
        value, note = None, problem or "nvidia-smi topo -m lists no pair of GPUs"
    else:
        value = any(link.startswith("NV") for link in links.values())
        note = ", ".join(f"GPU{a}-GPU{b} {link}" for (a, b), link in sorted(links.items()))
    return Fact(name="gpu.nvlink", value=value, path=_TOPOLOGY, note=note)


# In the order of the record; None stands for what other files or all GPUs tell.
_FACTS: dict[str, _Read | None] = {
    "gpu.installed": None,
    "gpu.names": lambda name, smi: _fact(name, ", ".join(gpu.name for gpu in smi.gpus)),
    "gpu.driver": lambda name, smi: _fact(
        name, smi.driver, note=f"CUDA {smi.cuda}" if smi.cuda else ""
    ),
    "gpu.pcie_gen": _worst(lambda gpu: gpu.link["gen"], min),
    "gpu.pcie_gen_max": _worst(lambda gpu: gpu.link["gen_max"], min),
    "gpu.pcie_width": _worst(lambda gpu: gpu.link["width"], min),
    "gpu.processes": _processes,
    "gpu.memory_used_mib": _worst(lambda gpu: gpu.memory_used_mib, max),
    "gpu.memory_total_mib": _worst(lambda gpu: gpu.memory_total_mib, min),
    "gpu.nvlink": None,
    "gpu.ecc_uncorrected": _worst(lambda gpu: gpu.counters["ecc_uncorrected_volatile"], max),
    "gpu.remap_pending": _any(lambda gpu: gpu.counters["remap_pending"]),
    "gpu.remap_failure": _any(lambda gpu: gpu.counters["remap_failure"]),
    "gpu.throttle": _reasons(lambda gpu: gpu.throttle),
    "gpu.caps": _reasons(lambda gpu: gpu.caps),
    "gpu.power_limit": _power_limit,
    "gpu.mig": _any(lambda gpu: gpu.mig),
}
