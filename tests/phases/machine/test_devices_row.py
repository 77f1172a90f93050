"""Row `devices`: each thing that a machine can report during a launch, made to happen once."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pandas as pd
import pytest

from runbook.files import utc_text
from runbook.records import Check, LaunchStatus, Outcome, Reason
from runbook.records.evidence import LaunchEvidence
from tests.phases import answers, builder, machine_files, spoil
from tests.phases.answers import DAMAGED, MACHINE, NEEDS_CUDA, NOTHING, OTHERWISE, WARNED, says

WHERE = builder.context()
XID = "NVRM: Xid (PCI:{}): {}, pid=4242, name=python"


def checked(change: spoil.Change, what: str = "devices", *, only: str = "run2") -> Check:
    found = builder.evidence("baseline", WHERE, change=change, only=[only])
    assert set(found.launches) >= {only}
    return builder.row("baseline", what, found, WHERE)


def counted(
    name: str, value: Any, *, gpu: int = 0, key: str = "counters", when: str = "devices_after"
) -> spoil.Change:
    """A value of one GPU after the launch, or before it."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        document = copy.deepcopy(getattr(made, when))
        document["gpus"][gpu][key][name] = value
        return replace(made, **{when: document})

    return change


_told = spoil.inside


def logged(*lines: str, **changes: Any) -> spoil.Change:
    return _told("kernel_log", lines=list(lines), **changes)


def without_driver(key: str) -> spoil.Change:
    """No driver answered, at its time."""
    silent = machine_files.no_devices()
    del silent["taken_at"]
    return _told(key, **silent)


def sampled(**columns: Any) -> spoil.Change:
    def change(made: LaunchEvidence) -> LaunchEvidence:
        return replace(made, gpu_samples=made.gpu_samples.assign(**columns))

    return change


def test_a_quiet_machine_passes_and_says_by_what() -> None:
    check = answers.row("baseline", "devices", where=WHERE)
    says(check, (Outcome.PASS, Reason.OK), "22 counters of GPU 0, 1 compared by nvml")
    assert "no fault in the kernel log (/dev/kmsg)" in check.reason
    assert check.measurement is not None and check.measurement.value == 0 and check.required


def of_gpu_1(when: str, **values: Any) -> spoil.Change:
    """What GPU 1 tells, changed; None takes it away."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        document = copy.deepcopy(getattr(made, when))
        one = {**document["gpus"][1], **values}
        document["gpus"][1] = {name: value for name, value in one.items() if value is not None}
        return replace(made, **{when: document})

    return change


def standing(key: str, **values: int) -> spoil.Change:
    """GPU 1 shows these before the launch and after it, so nothing changes."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        before, after = copy.deepcopy(made.devices_before), copy.deepcopy(made.devices_after)
        for document in (before, after):
            document["gpus"][1][key].update(values)
        return replace(made, devices_before=before, devices_after=after)

    return change


STANDING = {
    "uncorrected": ("counters", {"ecc_uncorrected_volatile": 1}),
    "pending": ("counters", {"remap_pending": 1}),
    "spare rows used up": ("counters", {"remap_failure": 1}),
    "retirement": ("counters", {"retired_pending": 1}),
    "narrow": ("link", {"width": 8}),
}


FAULTS = {
    "uncorrected": (counted("ecc_uncorrected_volatile", 2), "GPU 0: ecc_uncorrected_volatile 0"),
    "aggregate": (counted("ecc_uncorrected_aggregate", 8), "ecc_uncorrected_aggregate 7 -> 8"),
    "remapped": (counted("remapped_correctable", 1, gpu=1), "GPU 1: remapped_correctable 0 -> 1"),
    "pending": (counted("remap_pending", 1), "remap_pending 0 -> 1"),
    "reset": (counted("ecc_uncorrected_aggregate", 0), "the driver was loaded anew"),
    "replays": (counted("pcie_replays", 1000), "pcie_replays 0 -> 1000; allowed in this time: "),
    "narrower": (counted("width", 8, key="link"), "GPU 0: PCIe link x16 before and x8 after"),
    "xid": (logged(XID.format("0000:17:00", 79)), "GPU at 0000:17:00: Xid 79 (GPU has fallen off"),
    "unknown xid": (logged(XID.format("0000:18:00", 999)), "Xid 999 (not in the table"),
    "application xid": (logged(XID.format("0000:17:00", 31)), "Xid 31 (GPU memory page fault"),
    "bridge": (
        logged("pcieport 0000:56:01.0: AER: Uncorrectable (Fatal) error message received"),
        "pcie: ",
    ),
    "link down": (logged("pcieport 0000:57:01.0: pciehp: Slot(7): Link Down"), "Link Down"),
    "switch": (logged("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30"), "sxid"),
    "slow link": (sampled(pcie_gen=1.0), "GPU 0: PCIe generation 1 under load, 4 possible"),
    "narrow link": (sampled(pcie_width=8.0), "PCIe width 8 under load, 16 possible"),
    "capped before": (counted("limit_w", 220.0, key="power", when="devices_before"),
                      "GPU 0: power limit 220 W of 300 W before the launch"),
    "capped meanwhile": (counted("limit_w", 220.0, gpu=1, key="power"),
                         "GPU 1: power limit 220 W of 300 W after the launch"),
    "held clock": (sampled(sm_clock_mhz=840.0), "GPU 0: SM clock 840 MHz of 1410 in "),
    "throttled": (sampled(throttle_reasons="0x0000000000000040"), "hardware thermal slowdown in"),
    "shared": (
        sampled(other_processes=1.0, others="4711 python"),
        "GPU 0: another process computed there (4711 python)",
    ),
    "MIG": (of_gpu_1("devices_before", mig=True), "GPU 1: MIG is on"),
    "another driver": (_told("devices_after", driver="575"), "driver 580.95.05 -> 575 while the"),
    "gone": (of_gpu_1("devices_after", uuid=None, problem="GPU is lost"),
             "GPU 1 (GPU-1) does not answer after the launch"),
    "silent": (without_driver("devices_after"), "answered before the launch and not after it"),
    **{f"standing {name}": (standing(key, **values), "GPU 1: ")
       for name, (key, values) in STANDING.items()},
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_of_the_machine_is_invalid_and_named(what: str) -> None:
    change, said = FAULTS[what]
    check = says(checked(change), MACHINE, said, remedy="do not use these numbers")
    assert check.reason.startswith("run2: ") and check.measurement is not None
    # A number that was taken on it does not count either.
    throughput = checked(change, "throughput")
    assert throughput.outcome is Outcome.INVALID
    assert "these launches do not count" in throughput.reason


# The launch began at 23:59:54 and ended at 00:00:10.
OWN_TIMES = {
    "devices_before": ("taken_at", "2025-12-31T23:59:54Z"),
    "devices_after": ("taken_at", "2026-01-01T00:00:10Z"),
    "kernel_log": ("began_at", "2025-12-31T23:59:54Z"),
    "kernel log's end": ("ended_at", "2026-01-01T00:00:10Z"),
}


def moved(what: str, seconds: float) -> spoil.Change:
    """A document that tells of so many seconds later than the launch."""
    key, text = OWN_TIMES[what]
    then = datetime.fromisoformat(text) + timedelta(seconds=seconds)
    return _told("kernel_log" if "kernel" in what else what, **{key: utc_text(then)})


@pytest.mark.parametrize("what", OWN_TIMES)
def test_documents_that_tell_of_another_time_prove_nothing(what: str) -> None:
    assert checked(moved(what, 40.0)).outcome is Outcome.PASS
    for seconds in (-10.0, 90.0):
        says(checked(moved(what, seconds)), OTHERWISE, "is of another time", "the launch ")
    assert checked(moved(what, -86400.0), "throughput").outcome is Outcome.INVALID


@pytest.mark.parametrize("text", ["", "yesterday", None, "2026-01-01T00:00:00"])
def test_documents_without_a_time_are_damaged(text: str | None) -> None:
    says(checked(_told("devices_after", taken_at=text)), DAMAGED, "does not tell taken_at")


def redated(days: float) -> spoil.Change:
    def change(made: LaunchEvidence) -> LaunchEvidence:
        shifted = pd.to_datetime(made.gpu_samples["timestamp"]) + pd.Timedelta(days=days)
        text = shifted.dt.strftime("%Y/%m/%d %H:%M:%S.%f").str[:-3]
        return replace(made, gpu_samples=made.gpu_samples.assign(timestamp=text))

    return change


@pytest.mark.parametrize(
    "change",
    [redated(-30), redated(-1 / 24), redated(1 / 24)],
    ids=["a month", "an hour before", "an hour after"],
)
def test_samples_of_another_time_prove_nothing(change: spoil.Change) -> None:
    for what in ("devices", "gpu_utilisation"):
        says(checked(change, what), OTHERWISE, "gpu_samples.csv is of another time")


@pytest.mark.parametrize("kept", [0, 1])
def test_counters_of_other_gpus_than_the_ranks_used_do_not_count(kept: int) -> None:
    def change(made: LaunchEvidence) -> LaunchEvidence:
        uuids = {"uuids": ["0", "1"]}
        env = {**(made.env or {}), "device": {**(made.env or {})["device"], **uuids}}
        gpus = list((made.devices_before or {})["gpus"])[:kept]
        return replace(_told("devices_before", gpus=gpus)(made), env=env)

    says(checked(change), OTHERWISE, "does not tell of GPU ")


def in_row_120(frame: pd.DataFrame) -> list[float]:
    return [1.0 if row == 120 else 0.0 for row in range(len(frame))]


def resting(frame: pd.DataFrame) -> pd.Series[float]:
    """The link of a GPU that rests before and after the steps."""
    return (frame["utilization_percent"] > 50).map({True: 4.0, False: 1.0})


FINE = {
    "a repaired card": standing("counters", ecc_uncorrected_aggregate=12, remapped_uncorrectable=3),
    "a link at rest": sampled(pcie_gen=resting),
    "clocks at rest": sampled(sm_clock_mhz=210.0, utilization_percent=40.0),
    "clocks just high enough": sampled(sm_clock_mhz=850.0),
    "a limit close to the card's own": standing("power", limit_w=286),
    "a limit above it": standing("power", limit_w=310),
    "interrupted": spoil.both(
        without_driver("devices_after"), spoil.ended(LaunchStatus.INTERRUPTED)
    ),
}


@pytest.mark.parametrize("what", FINE)
def test_what_is_no_fault(what: str) -> None:
    check = checked(FINE[what])
    assert check.outcome is Outcome.PASS, check.reason
    assert check.code is Reason.OK or what == "interrupted"


WARNINGS = {
    "corrected": (counted("ecc_corrected_volatile", 3), "ecc_corrected_volatile 0 -> 3"),
    "a replay": (counted("pcie_replays", 8), "pcie_replays 0 -> 8; allowed in this time: 8"),
    "warm": (counted("thermal_violation_s", 0.5), "thermal_violation_s 0 -> 0.5"),
    "silent counter": (counted("pcie_replays", None), "pcie_replays could be read before and not"),
    "corrected link": (
        logged("nvidia 0000:17:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer"),
        "severity=Corrected",
    ),
    "oom": (logged("Out of memory: Killed process 9 (stress) total-vm:1kB"), "Killed process 9"),
    "no kernel log": (logged(source="", problem="/dev/kmsg: denied"), "unreadable: /dev/kmsg: den"),
    "lost": (logged(lost=True), "overwritten before it was read"),
    "flood": (logged(left_out=9), "9 more lines"),
    "one sample of another process": (sampled(other_processes=in_row_120), "in 1 samples"),
    "samples of other cards": (sampled(uuid="GPU-7"), "GPU 1 was not sampled while"),
    "no samples": (spoil.parts(gpu_samples=None), "the GPUs were not sampled"),
    "no clock": (sampled(sm_clock_mhz=math.nan), "GPU 0: its SM clock, or the highest, was not t"),
    "no driver": (
        spoil.both(without_driver("devices_before"), without_driver("devices_after")),
        "counters of the GPUs are unreadable: no NVIDIA driver; no nvidia-smi",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WARNINGS)
def test_what_does_not_decide_is_a_warning_and_never_silent(what: str) -> None:
    change, said = WARNINGS[what]
    check = says(checked(change), WARNED, said)
    assert check.remedy.startswith("the numbers stand")


def test_a_launch_that_took_no_step_had_nothing_to_be_sampled() -> None:
    """One that was interrupted while it started; what else it lacks other rows say."""
    found = checked(spoil.both(spoil.parts(gpu_samples=None), spoil.parts(ranks=())), only="run1")
    says(found, (Outcome.PASS, Reason.OK), "took no step")


@pytest.mark.parametrize("address", ["0000:3b:00", "0000:99:00"])
def test_an_xid_of_another_gpu_is_no_fault_of_this_launch(address: str) -> None:
    check = says(checked(logged(XID.format(address, 79))), (Outcome.PASS, Reason.OK))
    check = answers.row("baseline", "devices", logged(XID.format(address, 79)), WHERE)
    assert "1 line(s) about other devices" in check.reason


@pytest.mark.parametrize("key", ["devices_before", "devices_after", "kernel_log"])
def test_a_record_from_before_says_what_is_missing(key: str) -> None:
    says(checked(spoil.parts(**{key: None})), NOTHING, f"no {key}.json")
    assert checked(spoil.parts(**{key: None}), "throughput").outcome is Outcome.PASS


@pytest.mark.parametrize("key", ["devices_before", "devices_after", "kernel_log"])
@pytest.mark.parametrize("document", [{}, {"source": None, "problem": "", "gpus": [], "lines": []}])
def test_a_document_without_its_parts_is_damaged(key: str, document: dict[str, Any]) -> None:
    says(checked(spoil.parts(**{key: document})), DAMAGED)


def test_who_computes_may_be_unknown_and_is_said() -> None:
    check = answers.row("baseline", "devices", sampled(other_processes=math.nan), WHERE)
    assert check.code is Reason.OK and "whose processes compute was not told" in check.reason


def test_a_profile_without_gpus_skips_the_row() -> None:
    where = builder.context("cpu")
    check = says(answers.row("baseline", "devices", where=where), NEEDS_CUDA)
    assert not check.required


def test_a_crash_by_hardware_is_invalid_in_its_own_row() -> None:
    change = spoil.ended(LaunchStatus.HARDWARE_ERROR, cause="GPU 0000:17:00: Xid 79 (...)")
    says(checked(change, "completed"), MACHINE, "hardware error", "Xid 79")
