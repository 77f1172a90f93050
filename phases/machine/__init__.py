"""Rows about the machine: checkout, host, devices, links, nodes, before and during a launch.

Here those of what preflight finds: checkout, host, settings, and the GPUs that a launch can see.
Another environment makes numbers INVALID. What only skews numbers is a warning, named with its
remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from operator import gt, lt
from typing import Any, TypeVar

from nsa.toggles import meaning
from phases.kit import BUSY_SHARE, LONG_SEQUENCE, MEMORY_SHARE, POWER_LEAST, SHM_LEAST_GIB
from phases.kit.case import Case
from phases.kit.commands import environment
from phases.kit.finding import Finding, incomplete, invalid, missing, passed, skipped, warned
from runbook.records import Measurement, Reason
from runbook.records.evidence import Fact
from runbook.records.measurement import MIB_PER_GIB

T = TypeVar("T")


def recorded(case: Case, name: str) -> Finding:
    """PASS if the fact has a value."""
    _require_checkout(case, name)
    value = case.known(name)
    note = f" ({value.note})" if value.note else ""
    return passed(f"{value.value}{note}", measurement=value)


def _wrong(reason: str, value: Measurement, **more: Any) -> Finding:
    return invalid(Reason.WRONG_ENVIRONMENT, reason, measurement=value, **more)


def _require_checkout(case: Case, name: str) -> None:
    """Raise a warning where a package is installed, of no commit; a branch's profile forbids it."""
    fact = case.fact(name)
    if name.startswith("git.") and fact.value is None and case.profile.branch is None:
        raise warned(f"commit unknown: {fact.note}", evidence=(fact.path,))


def artifacts(case: Case) -> Finding:
    """The three files of requirements P2 and P3; nvidia_smi.xml only where there is a GPU."""
    wanted = {"git_sha.txt": "git.sha", "collect_env.txt": "torch.version"}
    if case.profile.has_gpu:
        wanted["nvidia_smi.xml"] = "gpu.driver"
    found = {file: case.fact(name) for file, name in wanted.items()}
    lacking = [file for file, fact in found.items() if fact.path != file or fact.value is None]
    if lacking == ["git_sha.txt"]:
        _require_checkout(case, "git.sha")
    if lacking:
        notes = "; ".join(found[file].note for file in lacking if found[file].note)
        reason = f"not recorded: {', '.join(lacking)}{f' ({notes})' if notes else ''}"
        # The one file that needs a GPU's tool is missing for the reason that its rows give.
        follows = notes if lacking == ["nvidia_smi.xml"] else ""
        return incomplete(Reason.MISSING_ARTIFACT, reason, evidence=tuple(wanted), follows=follows)
    left = "" if case.profile.has_gpu else "; no nvidia_smi.xml: this profile uses no GPU"
    return passed(f"{', '.join(wanted)}{left}", evidence=tuple(wanted))


def branch(case: Case) -> Finding:
    """INVALID on another branch than the profile's; any branch where it names none.

    Nothing is fetched: that the last fetch brought commits which are not here is a warning.
    """
    expected = case.profile.branch
    behind = _behind(case)
    if expected is None:
        fact = case.fact("git.branch")
        seen = f"on {fact.value or fact.note or 'no checkout'}{behind}"
        return skipped(Reason.NOT_ASKED_FOR, f"{seen}; the profile does not require a branch")
    value = case.known("git.branch")
    if value.value == expected:
        answer = warned if behind else passed
        return answer(f"on {expected}{behind}", measurement=value)
    return _wrong(f"on {value.value}, the profile expects {expected}", value)


def _behind(case: Case) -> str:
    """Words for the commits of its upstream that the checkout lacks; empty where there are none."""
    fact = case.evidence.facts.get("git.behind")
    return f", {fact.value:g} commits behind ({fact.note})" if fact and fact.value else ""


def clean_tree(case: Case) -> Finding:
    """A changed checkout is recorded; where the profile names a branch it is INVALID."""
    _require_checkout(case, "git.dirty")
    value = case.known("git.dirty")
    if value.value is False:
        return passed("the checkout matches its commit", measurement=value)
    reason = f"the checkout differs from its commit: {value.note or 'see git_status.txt'}"
    paths = ("git_status.txt", "git_diff.patch")
    if case.profile.branch is None:
        return warned(reason, measurement=value, evidence=paths)
    return _wrong(reason, value, evidence=paths)


def leftovers(case: Case) -> Finding:
    """INVALID where a trainer's starter is gone; a warning where trainers of a live run are seen.

    They are named, whoever started them, and left alone.
    """
    value = case.known("processes.leftover")
    if float(value.value) > 0:
        return _wrong(f"{float(value.value):.0f}: {value.note}", value)
    running = case.known("processes.other_runs")
    if float(running.value) > 0:
        reason = f"none, but {float(running.value):.0f} of runs that go on beside: {running.note}"
        return warned(reason, measurement=running)
    return passed("none", measurement=value)


def variables(case: Case) -> Finding:
    """Toggles and variables of the surrounding shell, checked against the installed torch."""
    value = _nothing_told(case, "env.problems", none="no problem")
    note = f"; {value.note}" if value.note else ""
    return passed(f"all variables are known{note}", measurement=value)


def needs(case: Case) -> Finding:
    """INVALID where a launch of this run needs what is not there, such as a package or the hub."""
    if "needs.missing" not in case.evidence.facts:
        return skipped(Reason.NOT_ASKED_FOR, "on nodes of a cluster it was not looked at")
    value = _nothing_told(case, "needs.missing", none="nothing")
    return passed(value.note or "nothing beside the program", measurement=value)


def _nothing_told(case: Case, name: str, *, none: str) -> Measurement:
    """A fact that tells what is wrong, in the words for `none`; raises INVALID where it does."""
    value = case.known(name)
    if value.value:
        raise _wrong(str(value.value), value)
    return value.model_copy(update={"value": none})


def sequential_prefill(case: Case) -> Finding:
    """A warning where prefill goes token by token at S >= 1024, as the baseline is planned."""
    if "baseline" not in case.profile.phases:
        raise incomplete(Reason.NOT_RUN, "the profile plans no baseline")
    planned = environment(case.context, "baseline")
    batched = bool(meaning("NSA_PREFILL_BATCHED", planned))
    override = case.context.config_overrides.get("train.seq_len")
    length = int(planned.get("NSA_SEQ_LEN") or override or case.profile.workload.seq_len)
    if length >= LONG_SEQUENCE and not batched:
        return warned(f"sequential prefill at S={length}: loops over tokens in Python")
    how = "batched" if batched else "sequential"
    return passed(f"{how} prefill at S={length}")


# Settings that skew numbers: from where on a value does, what it means, and the remedy.
_SETTINGS: dict[str, tuple[Callable[[Any, Any], bool], float, str, str]] = {
    "shm_gib": (lt, SHM_LEAST_GIB, "shared memory (/dev/shm) is small",
                "mount it larger (container: --shm-size)"),
    "shm_free_gib": (lt, SHM_LEAST_GIB, "shared memory (/dev/shm) is nearly full",
                     "remove what is left in it"),
    "load_per_cpu": (gt, BUSY_SHARE, "the machine is loaded (runnable per CPU)", "end other work"),
    "busy_cpus": (gt, 1.0, "other processes keep CPUs busy", "end them, or run when it is quiet"),
}  # fmt: skip


def host_settings(case: Case) -> Finding:
    """A warning that names each setting that skews numbers, and each that could not be read."""
    facts = case.evidence.facts
    known = {name: facts[f"host.{name}"] for name in _SETTINGS if f"host.{name}" in facts}
    if not known:
        raise missing("no setting of the host was collected")
    told = [text for name, fact in known.items() if (text := _skewing(name, fact))]
    silent = [f"{name} ({fact.note})" for name, fact in known.items() if fact.value is None]
    paths = tuple(dict.fromkeys(fact.path for fact in known.values()))
    parts = [*told, *([f"unreadable: {', '.join(silent)}"] if silent else [])]
    if told:
        return warned("; ".join(parts), evidence=paths)
    fine = f"{len(known) - len(silent)} settings read, none skews numbers"
    return passed("; ".join([fine, *parts]), evidence=paths)


def _skewing(name: str, fact: Fact) -> str:
    skews, bound, words, remedy = _SETTINGS[name]
    if fact.value is None or isinstance(fact.value, str) or not skews(fact.value, bound):
        return ""
    unit = f" {fact.unit}" if fact.unit else ""
    return f"{words} ({fact.value}{unit}): {remedy}"


# -- GPUs: can torch use them, are they those of the profile? --------------------------------------

# The oldest Linux driver for programs of a CUDA generation: NVIDIA, "CUDA Toolkit Release Notes",
# tables of driver versions and of minor version compatibility; the first driver of each branch.
_OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


def _asked_for(case: Case, wanted: T | None, what: str) -> T:
    """What the profile wants of its GPUs; raises that it is SKIPPED where that is nothing."""
    case.require_gpu()
    if wanted is None:
        raise skipped(Reason.NOT_ASKED_FOR, f"the profile does not specify {what}")
    return wanted


def cuda(case: Case) -> Finding:
    """Can torch use as many devices as the profile trains on?"""
    case.require_gpu()
    value = case.known("torch.cuda_available")
    if value.value is not True:
        why = _why_none(case)
        return _wrong(
            f"torch sees no CUDA device: {why}",
            value,
            title=f"No GPU that torch can use: profile {case.profile.name} trains on GPUs.",
            clue=f"This profile trains on GPUs, and {why}.",
        )
    count = case.known("torch.device_count")
    wanted, seen = case.profile.hardware.gpus, float(count.value)
    if seen < wanted:
        return _wrong(f"torch sees {seen:.0f} device(s), the profile uses {wanted}", count)
    return passed(f"torch sees {seen:.0f} device(s)", measurement=count)


def _why_none(case: Case) -> str:
    """The first cause that the facts show."""
    facts = case.evidence.facts
    built, count = facts.get("torch.cuda"), facts.get("gpu.count")
    if built is not None and built.value is None:
        return f"torch {case.told('torch.version') or ''} was built without CUDA"
    if count is None or count.value is None:
        return count.note if count else "nvidia-smi was not asked"
    if not count.value:
        hidden = f"all GPUs are hidden ({count.note})"
        return hidden if case.told("gpu.installed") else "nvidia-smi lists no GPU"
    return _too_old(case) or "driver and visible devices look right; see collect_env.txt"


def driver(case: Case) -> Finding:
    """Is the driver new enough for the CUDA that torch was built for?

    A data center's driver may run a newer CUDA through its compatibility package, so an old one is
    a warning where torch sees the GPUs all the same.
    """
    case.require_gpu()
    value = case.known("gpu.driver")
    old = _too_old(case)
    if not old:
        built = case.fact("torch.cuda")
        suits = f"; torch was built for CUDA {built.value}" if built.value else f"; {built.note}"
        return passed(f"{value.value}{suits}", measurement=value)
    if case.told("torch.cuda_available") is True:
        return warned(f"{old}; torch sees the GPUs all the same", measurement=value)
    return _wrong(old, value)


def _too_old(case: Case) -> str:
    """Why torch's CUDA cannot run on this driver, or an empty string."""
    here, built = case.told("gpu.driver"), case.told("torch.cuda")
    wanted = _OLDEST_DRIVER.get(_numbers(str(built))[0]) if built else None
    if wanted is None or not here or _numbers(str(here)) >= _numbers(wanted):
        return ""
    return f"driver {here}, but CUDA {built} of this torch needs {wanted} or newer"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)) or (0,)


def mig(case: Case) -> Finding:
    """Is no visible GPU cut into instances?"""
    case.require_gpu()
    value = case.known("gpu.mig")
    if value.value:
        part = "an instance is a part of a GPU, the profile is for all"
        return _wrong(f"MIG is on ({value.note}): {part}", value)
    return passed("MIG is off", measurement=value)


def extra_gpus(case: Case) -> Finding:
    """A warning where more GPUs are visible than the profile uses."""
    case.require_gpu()
    count = case.known("gpu.count")
    wanted, seen = case.profile.hardware.gpus, float(count.value)
    if seen > wanted:
        text = f"{seen:.0f} GPUs are visible, {wanted} will be used: rows about GPUs judge them all"
        return warned(text, measurement=count)
    return passed(f"{seen:.0f} visible, {wanted} used", measurement=count)


def gpu_names(case: Case) -> Finding:
    """Number and names of the GPUs."""
    hardware = case.profile.hardware
    if not case.profile.has_gpu:
        fact = case.fact("gpu.count")
        return skipped(
            Reason.NEEDS_CUDA, f"{fact.value or 0} GPU(s) here; this profile runs on the CPU"
        )
    count = case.known("gpu.count")
    names = case.known("gpu.names")
    if float(count.value) < hardware.gpus:
        why = f" ({count.note})" if count.note else ""
        reason = f"{float(count.value):.0f} GPU(s){why}, the profile needs {hardware.gpus}"
        return _wrong(reason, count)
    wanted = hardware.gpu_name
    others = [name for name in str(names.value).split(", ") if wanted and wanted not in name]
    if others:
        return _wrong(f"{', '.join(others)}; the profile is for {wanted}", names)
    return passed(f"{float(count.value):.0f} x {names.value}", measurement=names)


def gpu_memory(case: Case) -> Finding:
    """Memory of the smallest GPU against the profile's."""
    wanted = _asked_for(case, case.profile.hardware.gpu_memory_gib, "GPU memory")
    value = case.known("gpu.memory_total_mib")
    here = float(value.value) / MIB_PER_GIB
    if here < MEMORY_SHARE * wanted:
        return _wrong(f"{here:.0f} GiB, the profile needs {wanted:g}", value)
    return passed(f"{here:.0f} GiB", measurement=value)


def pcie(case: Case) -> Finding:
    """Generation that the link can reach (an idle one trains down), and its width."""
    wanted = _asked_for(case, case.profile.hardware.pcie_gen, "a PCIe link")
    best = case.known("gpu.pcie_gen_max")
    if float(best.value) != wanted:
        reason = f"PCIe generation {float(best.value):g}, the profile is for {wanted}"
        return _wrong(reason, best)
    width, lanes = case.known("gpu.pcie_width"), case.profile.hardware.pcie_width
    if lanes is not None and float(width.value) < lanes:
        return _wrong(f"x{float(width.value):g} link, the profile is for x{lanes}", width)
    return passed(f"generation {float(best.value):g}, x{float(width.value):g}", measurement=best)


def nvlink(case: Case) -> Finding:
    """NVLink changes what the throughput means, in either direction."""
    wanted = _asked_for(case, case.profile.hardware.nvlink, "NVLink")
    value = case.known("gpu.nvlink")
    text = f"{'NVLink' if value.value else 'no NVLink'}{f' ({value.note})' if value.note else ''}"
    if value.value is not wanted:
        expected = "NVLink" if wanted else "PCIe only"
        return _wrong(f"{text}; the profile is for {expected}", value)
    return passed(text, measurement=value)


def gpu_state(case: Case) -> Finding:
    """Nobody else on the GPUs, their memory empty, nothing broken or throttled."""
    case.require_gpu()
    busy = case.known("gpu.processes")
    if float(busy.value) > 0:
        return _wrong(f"{float(busy.value):.0f} process(es): {busy.note}", busy)
    used = case.known("gpu.memory_used_mib")
    limit = case.limit("gpu_idle_memory_mib")
    if limit.gated and not limit.holds(float(used.value)):
        return _wrong(f"{float(used.value):.0f} MiB in use before the run", used)
    if broken := "; ".join(_broken(case)):
        return _wrong(broken, busy)
    caps = case.told("gpu.caps")
    capped = f"; clocks limited by design: {caps}" if caps else ""
    return passed(f"no process, {float(used.value):.0f} MiB in use{capped}", measurement=busy)


def power_limit(case: Case) -> Finding:
    """INVALID where somebody set the power limit of a GPU under the one that it is sold with."""
    case.require_gpu()
    fact = case.fact("gpu.power_limit")
    if fact.value is None:
        return warned(f"power limits are unknown: {fact.note}", evidence=(fact.path,))
    value = case.known("gpu.power_limit")
    if float(value.value) < POWER_LEAST:
        return _wrong(f"{value.note}: held down to {float(value.value):.0%}", value)
    return passed(value.note, measurement=value)


def _broken(case: Case) -> Iterator[str]:
    """What the card itself reports; facts that it does not report say nothing."""
    ecc, throttle = case.told("gpu.ecc_uncorrected"), case.told("gpu.throttle")
    if isinstance(ecc, (int, float)) and ecc > 0:
        yield f"{ecc:g} uncorrected memory error(s)"
    if case.told("gpu.remap_pending") is True:
        yield "a row remap is pending: reset the GPU"
    if case.told("gpu.remap_failure") is True:
        yield "a row could not be remapped: replace the GPU"
    if throttle:
        yield f"throttled: {throttle}"
