"""All preflight collectors in one call: the files that they write, and the facts in them.

What this machine does not tell, such as all that nvidia-smi would, is a fact without a value that
says why.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from nsa.contract.digests import package_digest
from nsa.torch_env import VISIBLE_DEVICES
from runbook.config.settings import environment_notes, environment_problems
from runbook.errors import listed
from runbook.files import write_document
from runbook.folder.facts import finish, recorded_environment, redact_diff, redact_text
from runbook.machine import git, host
from runbook.machine.gpu import CAPS, THROTTLES, find_nvidia_smi, visible_gpus
from runbook.machine.gpu.cards import GpuState, NvidiaSmi, parse_topology, read_nvidia_smi
from runbook.machine.host import DEFAULT_RENDEZVOUS_PORT, Seen, TorchFacts, ask_torch, find_trainers
from runbook.machine.identity import package_folders
from runbook.process import NO_VARIABLES, run_tool
from runbook.records.evidence import Fact

_HOST = "host.json"
_OBSERVED_S = 0.25
_COLLECT_ENV = "collect_env.txt"
_SHA = "git_sha.txt"
_STATUS = "git_status.txt"
_DIFF = "git_diff.patch"
_Value = str | float | bool | None


def collect_preflight(
    run_root: Path,
    *,
    expected_branch: str | None,
    note: Callable[[str], None],
    trainer: str = "nsa.train",
    variables: Mapping[str, str] = NO_VARIABLES,
    needs: tuple[str, str] | None = None,
) -> dict[str, Fact]:
    """Describe checkout, torch, GPUs and host; write the artifacts into `run_root`.

    `variables` are those of CUDA that every launch will get: they decide which GPUs count. `needs`
    says what the launches need and lack, and what they have, where that was looked at. A fact
    that this machine does not have is there with value None and a note that says why.
    `note` is told what is being asked, which takes seconds.
    Raises OSError if `run_root` cannot be written.
    """
    note("preflight: checkout")
    drafts = _git_drafts(run_root, expected_branch) + _package_drafts()
    note("preflight: torch and trainer (imports both, takes seconds)")
    answers = ask_torch(trainer=trainer, cwd=run_root, variables=variables)
    drafts += _torch_drafts(run_root, answers)
    note("preflight: GPUs, disk, ports, processes")
    drafts += collect_gpus(
        run_root,
        torch_count=answers.device_count,
        environment={**os.environ, **variables},
    )
    drafts += _host_drafts(run_root)
    drafts += load_drafts()
    drafts += _process_drafts(find_trainers(trainer=trainer))
    drafts.append(_variables(uses_nccl=bool(answers.cuda_available)))
    drafts += [] if needs is None else [_fact("needs.missing", *map(redact_text, needs))]
    _write_host(run_root, drafts)
    return finish(drafts, run_root)


def _fact(name: str, value: _Value, note: str = "", *, unit: str = "", path: str = _HOST) -> Fact:
    return Fact(name=name, value=value, unit=unit, path=path, note=note)


def _git_drafts(run_root: Path, expected_branch: str | None) -> list[Fact]:
    checkout = git.find_checkout()
    if checkout is None:
        note = git.why_no_checkout()
        for name in (_SHA, _STATUS, _DIFF):
            _write(run_root / name, "")
        return [
            _fact(f"git.{key}", None, note, path=_SHA)
            for key in ("branch", "behind", "sha", "dirty", "diff_sha256")
        ]
    state = git.read_git(checkout)
    _write(run_root / _SHA, f"{state.sha}\n" if state.sha else "")
    elsewhere = _imported_from_elsewhere(checkout)
    changed = [*state.changed, *elsewhere]
    _write(run_root / _STATUS, "".join(f"{line}\n" for line in changed))
    _write(run_root / _DIFF, redact_diff(state.diff))
    branch_notes = [] if state.branch else ["detached HEAD"]
    branch_notes += [f"expected {expected_branch}"] if expected_branch else []
    where = "; ".join(state.problems) or f"in {checkout}"
    # What git shows comes last: a person looks there anyway.
    shown = (" ".join(line.split()) for line in state.status.splitlines())
    dirt = listed([*elsewhere, *state.unseen, *shown], between="; ")
    upstream = f"of {state.upstream}, as last fetched" if state.upstream else "no upstream branch"
    digest = "digest of the whole diff; secrets in the kept copy are blanked"
    return [
        _fact("git.branch", state.branch, ", ".join(branch_notes)),
        _fact("git.behind", state.behind, upstream, unit="commits"),
        _fact("git.sha", state.sha, where, path=_SHA),
        _fact("git.dirty", bool(changed), dirt, path=_STATUS),
        _fact("git.diff_sha256", state.diff_sha256, digest, path=_DIFF),
    ]


def _imported_from_elsewhere(checkout: Path) -> list[str]:
    """Packages that the checkout has and that are imported from another place."""
    return [
        f"{name} is imported from {folder}, not from {checkout}"
        for name, folder in package_folders().items()
        if (checkout / name / "__init__.py").is_file() and folder != (checkout / name).resolve()
    ]


def _torch_drafts(run_root: Path, answers: TorchFacts) -> list[Fact]:
    _write(run_root / _COLLECT_ENV, redact_text(answers.collect_env or answers.problem) + "\n")
    note = redact_text(answers.problem)
    torch = {
        "torch.version": answers.version,
        "torch.cuda_available": answers.cuda_available,
        "torch.device_count": answers.device_count,
    }
    without = note or ("" if answers.cuda else "this torch was built without CUDA")
    return [
        _fact("trainer.imports", answers.trainer_imports, redact_text(answers.trainer_error)),
        *(_fact(name, value, note, path=_COLLECT_ENV) for name, value in torch.items()),
        _fact("torch.cuda", answers.cuda, without, path=_COLLECT_ENV),
        _fact("torch.nccl", answers.nccl, note or ("" if answers.nccl else "torch sees no GPU")),
    ]


def _host_drafts(run_root: Path) -> list[Fact]:
    holder = host.port_holder()
    infiniband = host.find_infiniband()
    ports = ", ".join(f"{name} {state}" for name, state in infiniband.items())
    port = f"port {DEFAULT_RENDEZVOUS_PORT}" + (f" held by {holder}" if holder else "")
    return [
        _fact("infiniband.present", bool(infiniband), ports),
        _fact("disk.free_gib", shutil.disk_usage(run_root).free / 1024**3, unit="GiB"),
        _write_speed_draft(run_root),
        _fact("port.free", holder is None, port),
        _fact("cpu.count", host.count_cpus()),
        _fact("memory.total_gib", host.memory_total_gib(), unit="GiB"),
    ]


def _write_speed_draft(run_root: Path) -> Fact:
    try:
        speed, note = host.write_speed_mib_s(run_root), "64 MiB written and synced once"
    except OSError as error:
        speed, note = None, f"writing the probe file failed: {error.strerror or error}"
    return _fact("disk.write_mib_s", speed, note, unit="MiB/s")


def _process_drafts(processes: Sequence[Seen]) -> list[Fact]:
    drafts = []
    for name, orphan in (("processes.leftover", True), ("processes.other_runs", False)):
        chosen = [process for process in processes if process.orphan == orphan]
        drafts.append(_fact(name, len(chosen), redact_text(listed(chosen, between="; "))))
    return drafts


def _variables(*, uses_nccl: bool) -> Fact:
    problems = environment_problems(os.environ, uses_nccl=uses_nccl)
    notes = environment_notes(os.environ, uses_nccl=uses_nccl)
    told = "; ".join(f"{name}={os.environ[name]}: {note}" for name, note in notes.items())
    return _fact("env.problems", redact_text("; ".join(problems)), redact_text(told))


def _package_drafts() -> list[Fact]:
    """Where the package under test lies, as the harness would import it."""
    folder = package_folders()["nsa"]
    return [
        _fact("package.path", str(folder)),
        _fact("package.sha256", package_digest(folder)),
    ]


def _write_host(run_root: Path, drafts: Sequence[Fact]) -> None:
    document = {
        "facts": {
            draft.name: {"value": draft.value, "unit": draft.unit, "note": draft.note}
            for draft in drafts
        },
        "environment": recorded_environment(),
    }
    write_document(run_root / _HOST, document)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="surrogateescape")


def load_drafts(root: Path = Path("/")) -> list[Fact]:
    """Shared memory below `root`, and what else keeps processors busy; takes a quarter of a second.

    Without a /dev/shm its facts have no value, and say why.
    """
    busy, cores = psutil.cpu_percent(interval=_OBSERVED_S) / 100, psutil.cpu_count() or 1
    loaded = round(os.getloadavg()[0] / host.count_cpus(), 3)
    drafts = [
        _fact("host.load_per_cpu", loaded, "mean of the last minute"),
        _fact("host.busy_cpus", round(busy * cores, 2), f"of {cores}", unit="CPUs"),
    ]
    try:
        usage = shutil.disk_usage(root / "dev/shm")
    except OSError as error:
        why = f"{error.filename}: {error.strerror or error}"
        return [*drafts, _fact("host.shm_gib", None, why), _fact("host.shm_free_gib", None, why)]
    sizes = {"host.shm_gib": usage.total, "host.shm_free_gib": usage.free}
    return [*drafts, *(_fact(name, round(n / 1024**3, 3), unit="GiB") for name, n in sizes.items())]


_XML = "nvidia_smi.xml"
_TOPOLOGY = "nvidia_topo.txt"
_SMI_WITHIN_S = 60.0
# A value and a note, as the visible GPUs give them.
_Told = tuple[_Value, str]
_Read = Callable[[NvidiaSmi], _Told]
_UNITS = {"gpu.memory_used_mib": "MiB", "gpu.memory_total_mib": "MiB"}


def collect_gpus(
    run_root: Path,
    *,
    torch_count: int | None,
    environment: Mapping[str, str],
) -> list[Fact]:
    """Write nvidia_smi.xml and nvidia_topo.txt where there is an nvidia-smi; return the facts.

    The files tell of all GPUs, the facts of those that a launch in `environment` can see.
    `torch_count` is torch's number of devices; without nvidia-smi it is the number of GPUs.
    """
    program = find_nvidia_smi()
    if program is None:
        note = "no nvidia-smi on this machine"
        return no_gpu_drafts(note, file=_HOST, torch_count=torch_count)
    smi, xml, problem = read_nvidia_smi(program, within_s=_SMI_WITHIN_S)
    (run_root / _XML).write_text(redact_text(xml), encoding="utf-8")
    if smi is None:
        return no_gpu_drafts(problem, file=_XML, torch_count=torch_count)
    topology = run_tool([program, "topo", "-m"], timeout_s=_SMI_WITHIN_S)
    (run_root / _TOPOLOGY).write_text(topology.stdout or topology.problem, encoding="utf-8")
    shown = visible_gpus(smi.gpus, environment=environment)
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
    counted = note if torch_count is None else f"{note}; torch's own count"
    count = _fact("gpu.count", torch_count, counted, path=file)
    return [count, *(_fact(name, None, note, path=file) for name in _FACTS)]


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
    why = f"GPU {indices} of {len(smi.gpus)}, {chosen_by or 'all that torch sees'}"
    told: dict[str, _Told] = {
        "gpu.installed": (len(smi.gpus), ""),
        "gpu.nvlink": _nvlink([gpu.index for gpu in shown], links, topology_problem),
    }
    seen = replace(smi, gpus=shown)
    told |= {name: read(seen) for name, read in _FACTS.items() if read is not None}
    drafts = [_fact("gpu.count", len(shown), why if len(shown) < len(smi.gpus) else "", path=_XML)]
    for name in _FACTS:
        value, note = told[name]
        note = note or ("nvidia-smi does not say" if value is None else "")
        path = _TOPOLOGY if name == "gpu.nvlink" else _XML
        drafts.append(_fact(name, value, note, unit=_UNITS.get(name, ""), path=path))
    return drafts


def _worst(
    read: Callable[[GpuState], float | None], worst: Callable[[list[float]], float]
) -> _Read:
    def told(smi: NvidiaSmi) -> _Told:
        values = {gpu.index: read(gpu) for gpu in smi.gpus}
        known = [value for value in values.values() if value is not None]
        if len(known) < len(values) or not known:
            silent = ", ".join(str(index) for index, value in values.items() if value is None)
            return None, f"nvidia-smi does not say for GPU {silent or '-'}"
        note = ", ".join(f"GPU {index}: {value:g}" for index, value in values.items() if value)
        return worst(known), note if len(set(known)) > 1 else ""

    return told


def _any(read: Callable[[GpuState], float | None]) -> _Read:
    def told(smi: NvidiaSmi) -> _Told:
        values = {gpu.index: read(gpu) for gpu in smi.gpus}
        if yes := [str(index) for index, value in values.items() if value]:
            return True, f"GPU {', '.join(yes)}"
        return (None if not values or None in values.values() else False), ""

    return told


def _processes(smi: NvidiaSmi) -> _Told:
    """Those that compute; a desktop's graphics alone do not make a GPU busy."""
    busy = [(gpu, one) for gpu in smi.gpus for one in gpu.processes if "C" in one.kind]
    note = "; ".join(
        f"GPU {gpu.index}: pid {process.pid} {process.name}"
        + (f" {process.used_mib:g} MiB" if process.used_mib is not None else "")
        for gpu, process in busy
    )
    return len(busy), redact_text(note)


def _held_back(reasons: Mapping[str, str]) -> _Read:
    def told(smi: NvidiaSmi) -> _Told:
        found = {gpu.index: ", ".join(gpu.held_back_by(reasons)) for gpu in smi.gpus}
        return "; ".join(f"GPU {index}: {words}" for index, words in found.items() if words), ""

    return told


def _power_limit(smi: NvidiaSmi) -> _Told:
    """Of the GPU that is held down most: its power limit over the one that it is sold with."""
    shares, told = [], []
    for gpu in smi.gpus:
        limit, default = gpu.power["limit_w"], gpu.power["default_w"]
        if not limit or not default:
            return None, f"nvidia-smi does not say for GPU {gpu.index}"
        shares.append(limit / default)
        told.append(f"GPU {gpu.index}: {limit:g} of {default:g} W")
    return min(shares, default=None), "; ".join(told)


def _nvlink(shown: Sequence[int], every: Mapping[tuple[int, int], str], problem: str) -> _Told:
    links = {pair: link for pair, link in every.items() if set(pair) <= set(shown)}
    if len(shown) < 2:
        return False, "one GPU: no link between GPUs"
    if problem or not links:
        return None, problem or "nvidia-smi topo -m lists no pair of GPUs"
    note = ", ".join(f"GPU{a}-GPU{b} {link}" for (a, b), link in sorted(links.items()))
    return any(link.startswith("NV") for link in links.values()), note


# In the order of the record; None stands for what other files or all GPUs tell.
_FACTS: dict[str, _Read | None] = {
    "gpu.installed": None,
    "gpu.names": lambda smi: (", ".join(gpu.name for gpu in smi.gpus), ""),
    "gpu.driver": lambda smi: (smi.driver, f"CUDA {smi.cuda}" if smi.cuda else ""),
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
    "gpu.throttle": _held_back(THROTTLES),
    "gpu.caps": _held_back(CAPS),
    "gpu.power_limit": _power_limit,
    "gpu.mig": _any(lambda gpu: gpu.mig),
}
