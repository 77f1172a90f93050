"""Rows that compare a machine's facts with its profile: other hardware makes numbers INVALID."""

from __future__ import annotations

from phases.common.case import (
    Case,
    Finding,
    Unanswerable,
    incomplete,
    invalid,
    passed,
    skipped,
    warned,
)
from phases.common.commands import environment
from phases.limits import GPU_IDLE_MEMORY, LONG_SEQUENCE, MEMORY_SHARE
from runbook.records import Measurement, Reason

_MIB_PER_GIB = 1024.0


def recorded(case: Case, name: str) -> Finding:
    """PASS if the fact has a value."""
    unknown = _no_checkout(case, name)
    if unknown:
        return unknown
    fact, value = case.known(name)
    note = f" ({fact.note})" if fact.note else ""
    return passed(f"{fact.value}{note}", measurement=value)


def _no_checkout(case: Case, name: str) -> Finding | None:
    """An installed package belongs to no commit; only a profile with a branch forbids that."""
    fact = case.fact(name)
    if not name.startswith("git.") or fact.value is not None or case.profile.branch is not None:
        return None
    return warned(f"commit unknown: {fact.note}", evidence=(fact.path,))


def answered(case: Case, name: str) -> Finding:
    """As `recorded`; SKIPPED on a profile without GPUs."""
    return _no_gpu(case) or recorded(case, name)


def _no_gpu(case: Case) -> Finding | None:
    if case.profile.has_gpu:
        return None
    return skipped(Reason.NEEDS_CUDA, f"profile {case.profile.name} uses no GPU")


def artifacts(case: Case) -> Finding:
    """The three files of requirements P2 and P3; nvidia_smi.xml only where there is a GPU."""
    wanted = {"git_sha.txt": "git.sha", "collect_env.txt": "torch.version"}
    if case.profile.has_gpu:
        wanted["nvidia_smi.xml"] = "gpu.driver"
    found = {file: case.fact(name) for file, name in wanted.items()}
    missing = [file for file, fact in found.items() if fact.path != file or fact.value is None]
    unknown = _no_checkout(case, "git.sha")
    if unknown and missing == ["git_sha.txt"]:
        return unknown
    if missing:
        notes = "; ".join(found[file].note for file in missing if found[file].note)
        reason = f"not recorded: {', '.join(missing)}{f' ({notes})' if notes else ''}"
        return incomplete(Reason.MISSING_ARTIFACT, reason, evidence=tuple(wanted))
    left = "" if case.profile.has_gpu else "; no nvidia_smi.xml: this profile uses no GPU"
    return passed(f"{', '.join(wanted)}{left}", evidence=tuple(wanted))


def branch(case: Case) -> Finding:
    """INVALID on another branch than the profile's; any branch where it names none."""
    expected = case.profile.branch
    if expected is None:
        fact = case.fact("git.branch")
        seen = fact.value or fact.note or "no checkout"
        return skipped(Reason.NOT_ASKED_FOR, f"on {seen}; the profile does not require a branch")
    fact, value = case.known("git.branch")
    if fact.value == expected:
        return passed(f"on {expected}", measurement=value)
    reason = f"on {fact.value}, the profile expects {expected}"
    return invalid(Reason.WRONG_ENVIRONMENT, reason, measurement=value)


def clean_tree(case: Case) -> Finding:
    """A changed checkout is recorded; where the profile names a branch it is INVALID."""
    unknown = _no_checkout(case, "git.dirty")
    if unknown:
        return unknown
    fact, value = case.known("git.dirty")
    if fact.value is False:
        return passed("the checkout matches its commit", measurement=value)
    reason = f"the checkout differs from its commit: {fact.note or 'see git_status.txt'}"
    paths = ("git_status.txt", "git_diff.patch")
    if case.profile.branch is None:
        return warned(reason, measurement=value, evidence=paths)
    return invalid(Reason.WRONG_ENVIRONMENT, reason, measurement=value, evidence=paths)


def _wrong_hardware(reason: str, value: Measurement) -> Finding:
    return invalid(Reason.WRONG_ENVIRONMENT, reason, measurement=value)


def gpu_names(case: Case) -> Finding:
    """Number and names of the GPUs."""
    hardware = case.profile.hardware
    if not case.profile.has_gpu:
        fact = case.fact("gpu.count")
        return skipped(
            Reason.NEEDS_CUDA, f"{fact.value or 0} GPU(s) here; this profile runs on the CPU"
        )
    torch = case.evidence.facts.get("torch.cuda_available")
    if torch is not None and torch.value is False:
        _, value = case.known("torch.cuda_available")
        seen = case.evidence.facts.get("gpu.count")
        here = f"; {seen.note}" if seen is not None and seen.value is None and seen.note else ""
        return _wrong_hardware(f"torch sees no CUDA device{here}", value)
    _, count = case.known("gpu.count")
    fact, names = case.known("gpu.names")
    if float(count.value) < hardware.gpus:
        reason = f"{float(count.value):.0f} GPU(s), the profile needs {hardware.gpus}"
        return _wrong_hardware(reason, count)
    wanted = hardware.gpu_name
    others = [name for name in str(fact.value).split(", ") if wanted and wanted not in name]
    if others:
        return _wrong_hardware(f"{', '.join(others)}; the profile is for {wanted}", names)
    return passed(f"{float(count.value):.0f} x {fact.value}", measurement=names)


def gpu_memory(case: Case) -> Finding:
    """Memory of the smallest GPU against the profile's."""
    wanted = case.profile.hardware.gpu_memory_gib
    if not case.profile.has_gpu or wanted is None:
        return _no_gpu(case) or skipped(
            Reason.NOT_ASKED_FOR, "the profile does not specify GPU memory"
        )
    _, value = case.known("gpu.memory_total_mib")
    here = float(value.value) / _MIB_PER_GIB
    if here < MEMORY_SHARE * wanted:
        return _wrong_hardware(f"{here:.0f} GiB, the profile needs {wanted:g}", value)
    return passed(f"{here:.0f} GiB", measurement=value)


def pcie(case: Case) -> Finding:
    """Generation that the link can reach (an idle one trains down), and its width."""
    hardware = case.profile.hardware
    if not case.profile.has_gpu or hardware.pcie_gen is None:
        return _no_gpu(case) or skipped(
            Reason.NOT_ASKED_FOR, "the profile does not specify a PCIe link"
        )
    _, best = case.known("gpu.pcie_gen_max")
    if float(best.value) != hardware.pcie_gen:
        reason = f"PCIe generation {float(best.value):g}, the profile is for {hardware.pcie_gen}"
        return _wrong_hardware(reason, best)
    _, width = case.known("gpu.pcie_width")
    if hardware.pcie_width is not None and float(width.value) < hardware.pcie_width:
        reason = f"x{float(width.value):g} link, the profile is for x{hardware.pcie_width}"
        return _wrong_hardware(reason, width)
    return passed(f"generation {float(best.value):g}, x{float(width.value):g}", measurement=best)


def nvlink(case: Case) -> Finding:
    """NVLink changes what the throughput means, in either direction."""
    wanted = case.profile.hardware.nvlink
    if not case.profile.has_gpu or wanted is None:
        return _no_gpu(case) or skipped(Reason.NOT_ASKED_FOR, "the profile does not specify NVLink")
    fact, value = case.known("gpu.nvlink")
    text = f"{'NVLink' if fact.value else 'no NVLink'}{f' ({fact.note})' if fact.note else ''}"
    if fact.value is not wanted:
        expected = "NVLink" if wanted else "PCIe only"
        return _wrong_hardware(f"{text}; the profile is for {expected}", value)
    return passed(text, measurement=value)


def gpu_state(case: Case) -> Finding:
    """Nobody else on the GPUs, their memory empty, nothing broken or throttled."""
    skip = _no_gpu(case)
    if skip:
        return skip
    fact, busy = case.known("gpu.processes")
    if float(busy.value) > 0:
        return _wrong_hardware(f"{float(busy.value):.0f} process(es): {fact.note}", busy)
    _, used = case.known("gpu.memory_used_mib")
    limit = case.limit(GPU_IDLE_MEMORY)
    if limit.gated and not limit.holds(float(used.value)):
        return _wrong_hardware(f"{float(used.value):.0f} MiB in use before the run", used)
    broken = _broken(case)
    if broken:
        return _wrong_hardware(broken, busy)
    return passed(f"no process, {float(used.value):.0f} MiB in use", measurement=busy)


def _broken(case: Case) -> str:
    """What the card itself reports; facts that it does not report say nothing."""
    problems = []
    facts = case.evidence.facts
    ecc, remap, throttle = (
        facts.get(f"gpu.{name}") for name in ("ecc_uncorrected", "remap_pending", "throttle")
    )
    if ecc and isinstance(ecc.value, (int, float)) and ecc.value > 0:
        problems.append(f"{ecc.value:g} uncorrected memory error(s)")
    if remap and remap.value is True:
        problems.append("a row remap is pending: reset the GPU")
    if throttle and throttle.value:
        problems.append(f"throttled: {throttle.value}")
    return "; ".join(problems)


def count_is_zero(case: Case, name: str) -> Finding:
    """INVALID if something is there that must not be."""
    fact, value = case.known(name)
    if float(value.value) == 0:
        return passed("none", measurement=value)
    return invalid(
        Reason.WRONG_ENVIRONMENT, f"{float(value.value):.0f}: {fact.note}", measurement=value
    )


def variables(case: Case) -> Finding:
    """Toggles and variables of the surrounding shell, checked against the installed torch."""
    fact, value = case.known("env.problems")
    if fact.value:
        return invalid(Reason.WRONG_ENVIRONMENT, str(fact.value), measurement=value)
    value = value.model_copy(update={"value": "no problem"})
    note = f"; {fact.note}" if fact.note else ""
    return passed(f"all variables are known{note}", measurement=value)


def sequential_prefill(case: Case) -> Finding:
    """A warning where prefill goes token by token at S >= 1024, as the baseline is planned."""
    if "baseline" not in case.profile.phases:
        raise Unanswerable(incomplete(Reason.NOT_RUN, "the profile plans no baseline"))
    planned = environment(case.context, "baseline")
    batched = planned.get("NSA_PREFILL_BATCHED", "0") not in ("0", "false", "off", "no")
    override = case.context.config_overrides.get("train.seq_len")
    length = int(planned.get("NSA_SEQ_LEN") or override or case.profile.workload.seq_len)
    if length >= LONG_SEQUENCE and not batched:
        return warned(f"sequential prefill at S={length}: loops over tokens in Python")
    how = "batched" if batched else "sequential"
    return passed(f"{how} prefill at S={length}")
