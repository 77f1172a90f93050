"""Row `devices`: what GPUs, links and kernel reported while a launch ran makes it suspect.

Counters before and after, the kernel log between, and the samples during the steps. What cannot be
read is said, and never counts as healthy in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from phases.kit import PCIE_REPLAYS_PER_MINUTE, POWER_LEAST, TAKEN_EARLY_S, TAKEN_LATE_S
from phases.kit.case import Case, once
from phases.kit.finding import Finding, invalid, missing, passed, warned, whole
from phases.kit.measure import file_value
from phases.machine.samples import Notes, sampled
from runbook.files import utc_seconds, utc_text
from runbook.folder import DEVICES_AFTER_JSON, DEVICES_BEFORE_JSON, KERNEL_LOG_JSON
from runbook.machine import kernel_log
from runbook.records import LaunchStatus, Reason
from runbook.records.evidence import LaunchEvidence

# Of a GPU in devices_before.json and devices_after.json, with what it means that one grew between
# the two: memory, driver or card failed (`fault`), something to tell, or a fault by its rate.
# `standing`: a fault also where it is there before a launch. Preflight found none of these, so it
# came since, perhaps while a launch on fewer GPUs left this one out.
DEVICE_COUNTERS: Mapping[str, str] = {
    # Corrected, the values stay right; the driver's own alarm for too many is Xid 92.
    "ecc_corrected_volatile": "told",
    "ecc_uncorrected_volatile": "standing fault",
    "ecc_corrected_aggregate": "told",
    "ecc_uncorrected_aggregate": "fault",
    "remapped_correctable": "fault",
    "remapped_uncorrectable": "fault",
    "remap_pending": "standing fault",
    "remap_failure": "standing fault",
    "pcie_replays": "rate",
    "power_violation_s": "",
    "thermal_violation_s": "told",
}
_SHOWN = 3
_Told = Mapping[str, Any]
_DOCUMENTS = {
    "devices_before": DEVICES_BEFORE_JSON,
    "devices_after": DEVICES_AFTER_JSON,
    "kernel_log": KERNEL_LOG_JSON,
}


@once
def device_changes(case: Case, name: str) -> Finding:
    """PASS where nothing changed; INVALID where a fault shows that the machine was not healthy."""
    case.require_gpu()
    launch = case.launch(name)
    documents = {file: _document(launch, key, file) for key, file in _DOCUMENTS.items()}
    _require_own_times(launch, documents)
    before, after, kernel = documents.values()
    gpus = _used(launch, before)
    notes = Notes()
    _standing(gpus, case.profile.hardware.pcie_width, notes)
    compared = _compare(launch, gpus, before, after, notes)
    _read_kernel(kernel, gpus, notes)
    sampled(launch, gpus, notes)
    return _said(launch, compared, notes)


def _said(launch: LaunchEvidence, compared: int, notes: Notes) -> Finding:
    name = launch.launch.name
    paths = (launch.path("devices_before"), launch.path("kernel_log"), launch.path("gpu_samples"))
    faults, counted = float(len(notes.faults)), max(1, compared)
    value = file_value(launch, "devices_after", "device_faults", faults, "faults", n=counted)
    if notes.faults:
        reason = f"{name}: {'; '.join([*notes.faults, *notes.warnings])}"
        return invalid(
            Reason.WRONG_ENVIRONMENT, reason, measurement=value, evidence=paths, topic="devices"
        )
    if notes.warnings:
        reason = f"{name}: {'; '.join(notes.warnings)}"
        return warned(reason, measurement=value, evidence=paths, topic="devices_told")
    return passed(f"{name}: {'; '.join(notes.seen)}", measurement=value, evidence=paths)


def _document(launch: LaunchEvidence, key: str, file: str) -> Mapping[str, Any]:
    """A document of the launch, whole."""
    path = launch.path(key)
    whole(launch, file, key)
    document: Mapping[str, Any] | None = getattr(launch, key)
    if document is None:
        name = launch.launch.name
        raise missing(f"{name}: no {file} (recorded before it was written, or lost)", path)
    wanted = ("source", "problem", "lines" if key == "kernel_log" else "gpus")
    if absent := [part for part in wanted if document.get(part) is None]:
        reason = f"{path}: it lacks {', '.join(absent)}"
        raise invalid(Reason.DAMAGED_ARTIFACT, reason, evidence=(path,))
    return document


def _used(launch: LaunchEvidence, before: Mapping[str, Any]) -> list[_Told]:
    """The GPUs of the ranks, as the trainer tells; else all that the launch might have used.

    Raises a finding where GPUs answered, and those of the ranks are not all among them.
    """
    gpus: list[_Told] = list(before["gpus"])
    uuids = ((launch.env or {}).get("device") or {}).get("uuids") or ()
    wanted = {str(uuid).removeprefix("GPU-") for uuid in uuids}
    found = {str(gpu.get("uuid") or "").removeprefix("GPU-"): gpu for gpu in gpus}
    if not wanted or not before["source"]:
        return gpus
    if lacking := sorted(wanted - found.keys()):
        path = launch.path("devices_before")
        reason = f"{path}: it does not tell of GPU {', '.join(lacking)}, which a rank used"
        raise invalid(Reason.MISMATCH, reason, evidence=(path, launch.path("env")))
    return [gpu for uuid, gpu in found.items() if uuid in wanted]


def _require_own_times(launch: LaunchEvidence, documents: Mapping[str, _Told]) -> None:
    """Raise a finding unless each document was written when the launch began, or ended.

    What was taken at another time says nothing of this launch, however healthy it looks.
    """
    begun = utc_seconds(launch.result.started_at)
    ended = begun + launch.result.duration_s
    for file, key, expected, word in (
        (DEVICES_BEFORE_JSON, "taken_at", begun, "began"),
        (DEVICES_AFTER_JSON, "taken_at", ended, "ended"),
        (KERNEL_LOG_JSON, "began_at", begun, "began"),
        (KERNEL_LOG_JSON, "ended_at", ended, "ended"),
    ):
        told = str(documents[file].get(key) or "unknown")
        if not -TAKEN_EARLY_S <= utc_seconds(told) - expected <= TAKEN_LATE_S:
            path = f"{launch.launch.run_dir}/{file}"
            reason = (
                f"{path} is of another time: {key} {told}, the launch {word} at "
                f"{utc_text(datetime.fromtimestamp(expected, tz=UTC))}"
            )
            raise invalid(Reason.MISMATCH, reason, evidence=(path,), topic="devices")


# -- before the launch ---------------------------------------------------------------------------


def _standing(gpus: Sequence[_Told], wanted_width: int | None, notes: Notes) -> None:
    """What was wrong already when the launch began, so that it shows as no change."""
    for gpu in gpus:
        where, counters = f"GPU {gpu.get('index')}", gpu.get("counters") or {}
        notes.faults += [
            f"{where}: {name} is {counters[name]:g} before the launch"
            for name, means in DEVICE_COUNTERS.items()
            if means.startswith("standing") and (counters.get(name) or 0) > 0
        ]
        if gpu.get("mig"):
            notes.faults.append(f"{where}: MIG is on")
        width = _link(gpu, "width")
        if width and wanted_width and width < wanted_width:
            text = f"PCIe link x{width:g} before the launch, the profile is for x{wanted_width}"
            notes.faults.append(f"{where}: {text}")
        _held_down(gpu, where, "before", notes)


def _held_down(gpu: _Told, where: str, when: str, notes: Notes) -> None:
    """A power limit that somebody set under the card's own; the samples show it in the clocks."""
    power = gpu.get("power") or {}
    limit, own = power.get("limit_w"), power.get("default_w")
    if limit and own and limit < POWER_LEAST * own:
        text = f"power limit {limit:g} W of {own:g} W {when} the launch"
        notes.faults.append(f"{where}: {text} (nvidia-smi -pl {own:g} gives it back)")


# -- counters --------------------------------------------------------------------------------------


def _compare(
    launch: LaunchEvidence, gpus: Sequence[_Told], before: _Told, after: _Told, notes: Notes
) -> int:
    """Note every change; returns how many counters could be compared."""
    if not before["source"]:
        notes.warnings.append(f"counters of the GPUs are unreadable: {before['problem']}")
        return 0
    if not after["source"]:
        text = f"the GPUs answered before the launch and not after it: {after['problem']}"
        hurried = launch.result.status is LaunchStatus.INTERRUPTED
        (notes.warnings if hurried else notes.faults).append(text)
        return 0
    if after.get("driver") != before.get("driver"):
        change = f"{before.get('driver') or 'unknown'} -> {after.get('driver') or 'unknown'}"
        notes.faults.append(f"driver {change} while the launch ran")
    later = {str(gpu.get("uuid") or gpu.get("index")): gpu for gpu in after["gpus"]}
    compared = sum(_compare_one(launch, gpu, later, notes) for gpu in gpus)
    if not compared:
        notes.warnings.append("the GPUs told none of their counters")
    sources = dict.fromkeys((str(before["source"]), str(after["source"])))
    why = f" ({before['problem']})" if before["problem"] else ""
    indices = ", ".join(str(gpu.get("index")) for gpu in gpus)
    notes.seen.append(
        f"{compared} counters of GPU {indices} compared by {' and '.join(sources)}{why}"
    )
    return compared


def _compare_one(
    launch: LaunchEvidence, gpu: _Told, later: Mapping[str, _Told], notes: Notes
) -> int:
    where = f"GPU {gpu.get('index')}"
    now = later.get(str(gpu.get("uuid") or gpu.get("index")))
    if gpu.get("problem"):
        notes.faults.append(f"{where} did not answer before the launch: {gpu['problem']}")
        return 0
    if now is None or now.get("problem"):
        why = f": {now['problem']}" if now else ""
        notes.faults.append(f"{where} ({gpu.get('uuid')}) does not answer after the launch{why}")
        return 0
    _held_down(now, where, "after", notes)
    compared = 0
    for name, first, last in _pairs(gpu, now, where, notes):
        compared += 1
        if last == first:
            continue
        change, means = f"{where}: {name} {first:g} -> {last:g}", DEVICE_COUNTERS.get(name, "")
        if last < first:
            notes.faults.append(f"{change}: reset, or the driver was loaded anew")
        elif means.endswith("fault"):
            notes.faults.append(change)
        elif means == "told":
            notes.warnings.append(change)
        elif means == "rate":
            allowed = PCIE_REPLAYS_PER_MINUTE * max(1.0, launch.result.duration_s / 60.0)
            told = notes.warnings if last - first <= allowed else notes.faults
            told.append(f"{change}; allowed in this time: {allowed:.0f}")
    width, later_width = _link(gpu, "width"), _link(now, "width")
    if width and later_width and later_width < width:
        notes.faults.append(f"{where}: PCIe link x{width:g} before and x{later_width:g} after")
    return compared


def _pairs(gpu: _Told, now: _Told, where: str, notes: Notes) -> Iterator[tuple[str, float, float]]:
    """Counters that are known before and after; one that is known only before is a warning."""
    first, last = gpu.get("counters") or {}, now.get("counters") or {}
    for name, value in first.items():
        if value is None:
            continue
        if last.get(name) is None:
            notes.warnings.append(f"{where}: {name} could be read before and not after the launch")
        else:
            yield name, float(value), float(last[name])


def _link(gpu: _Told, name: str) -> float | None:
    value = (gpu.get("link") or {}).get(name)
    return None if value is None else float(value)


# -- the kernel log --------------------------------------------------------------------------------


def _read_kernel(kernel: Mapping[str, Any], gpus: Sequence[_Told], notes: Notes) -> None:
    if not kernel["source"] or kernel["problem"]:
        notes.warnings.append(f"the kernel log is unreadable: {kernel['problem']}")
        return
    if kernel.get("lost"):
        notes.warnings.append("part of the kernel log was overwritten before it was read")
    if kernel.get("left_out"):
        notes.warnings.append(f"{kernel['left_out']} more lines of the kernel log were not kept")
    slots = {kernel_log.slot_of(gpu["pci"]) for gpu in gpus if gpu.get("pci")}
    slots |= {slot for gpu in gpus for slot in gpu.get("pci_path") or ()}
    lines = kernel_log.parse_lines(kernel["lines"])
    ours = [line for line in lines if kernel_log.concerns(line, slots)]
    faults = list(dict.fromkeys(_fault(line) for line in ours if line.fatal))
    told = list(dict.fromkeys(line.text for line in ours if not line.fatal))
    notes.faults += faults[:_SHOWN]
    notes.warnings += [f'kernel: "{text}"' for text in told[:_SHOWN]]
    if more := max(0, len(faults) - _SHOWN) + max(0, len(told) - _SHOWN):
        notes.warnings.append(f"{more} more lines in {KERNEL_LOG_JSON}")
    others = len(lines) - len(ours)
    beside = f", {others} line(s) about other devices" if others else ""
    notes.seen.append(f"no fault in the kernel log ({kernel['source']}){beside}")


def _fault(line: kernel_log.KernelLine) -> str:
    where = f"GPU at {line.pci[0]}: " if line.pci else ""
    if line.xid is None:
        return f'{where}{line.kind}: "{line.text}"'
    known = kernel_log.XIDS.get(line.xid)
    return f"{where}{kernel_log.describe(line.xid)}{f': {known.remedy}' if known else ''}"
