"""What a machine can report during a launch, made to happen once: devices, and other work."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Any

import pandas as pd
import pytest

from runbook.files import utc_text
from runbook.records import Check, LaunchStatus, Outcome, Reason
from tests.phases import answers, builder, machine_files, spoil
from tests.phases.answers import (
    DAMAGED,
    FINE,
    MACHINE,
    NEEDS_CUDA,
    NOTHING,
    OTHERWISE,
    WARNED,
    says,
)
from tests.phases.spoil import Change, at, both

WHERE, CPU = builder.context(), builder.context("cpu")
UNTOLD = (Outcome.SKIPPED, Reason.NOTHING_COLLECTED)
XID = "NVRM: Xid (PCI:{}): {}, pid=4242, name=python"


def checked(change: Change, what: str = "devices", *, only: str = "run2") -> Check:
    return answers.row("baseline", what, change, WHERE, only=[only])


def of_gpu(number: int, when: str, **values: Any) -> Change:
    """What a GPU tells after the launch, or before it; `counters` and so on by their names."""
    return both(*(at(f"devices_{when}.gpus.{number}.{name.replace('__', '.')}", value)
                  for name, value in values.items()))  # fmt: skip


def counted(name: str, value: Any, gpu: int = 0) -> Change:
    return of_gpu(gpu, "after", **{f"counters__{name}": value})


def standing(key: str, **values: int) -> Change:
    """GPU 1 shows these before the launch and after it, so nothing changes."""
    shown = {f"{key}__{name}": value for name, value in values.items()}
    return both(of_gpu(1, "before", **shown), of_gpu(1, "after", **shown))


def logged(*lines: str, **changes: Any) -> Change:
    return at("kernel_log", lines=list(lines), **changes)


def without_driver(key: str) -> Change:
    """No driver answered, at its time."""
    silent = machine_files.no_devices()
    del silent["taken_at"]
    return at(key, **silent)


def sampled(**columns: Any) -> Change:
    return at("gpu_samples", **columns)


def capped(gpu: int, when: str) -> Change:
    return of_gpu(gpu, when, power__limit_w=220.0)


def broken(number: int) -> Change:
    return logged(XID.format("0000:17:00", number))


BRIDGE = "pcieport 0000:56:01.0: AER: Uncorrectable (Fatal) error message received"
SWITCH = "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30"
FAULTS: dict[str, tuple[Change, str]] = {
    "uncorrected": (counted("ecc_uncorrected_volatile", 2), "GPU 0: ecc_uncorrected_volatile 0"),
    "aggregate": (counted("ecc_uncorrected_aggregate", 8), "ecc_uncorrected_aggregate 7 -> 8"),
    "remapped": (counted("remapped_correctable", 1, 1), "GPU 1: remapped_correctable 0 -> 1"),
    "pending": (counted("remap_pending", 1), "remap_pending 0 -> 1"),
    "reset": (counted("ecc_uncorrected_aggregate", 0), "the driver was loaded anew"),
    "replays": (counted("pcie_replays", 1000), "pcie_replays 0 -> 1000; allowed in this time: "),
    "narrower": (of_gpu(0, "after", link__width=8), "GPU 0: PCIe link x16 before and x8 after"),
    "xid": (broken(79), "GPU at 0000:17:00: Xid 79 (GPU has fallen off"),
    "unknown xid": (logged(XID.format("0000:18:00", 999)), "Xid 999 (not in the table"),
    "application xid": (broken(31), "Xid 31 (GPU memory page fault"),
    "bridge": (logged(BRIDGE), "pcie: "),
    "link down": (logged("pcieport 0000:57:01.0: pciehp: Slot(7): Link Down"), "Link Down"),
    "switch": (logged(SWITCH), "sxid"),
    "slow link": (sampled(pcie_gen=1.0), "GPU 0: PCIe generation 1 under load, 4 possible"),
    "narrow link": (sampled(pcie_width=8.0), "PCIe width 8 under load, 16 possible"),
    "capped before": (capped(0, "before"), "GPU 0: power limit 220 W of 300 W before the launch"),
    "capped meanwhile": (capped(1, "after"), "GPU 1: power limit 220 W of 300 W after the launch"),
    "held clock": (sampled(sm_clock_mhz=840.0), "GPU 0: SM clock 840 MHz of 1410 in "),
    "throttled": (sampled(throttle_reasons="0x0000000000000040"), "hardware thermal slowdown in"),
    "shared": (sampled(other_processes=1.0, others="4711 python"),
               "GPU 0: another process computed there (4711 python)"),
    "MIG": (of_gpu(1, "before", mig=True), "GPU 1: MIG is on"),
    "another driver": (at("devices_after", driver="575"), "driver 580.95.05 -> 575 while the"),
    "gone": (of_gpu(1, "after", uuid=None, problem="GPU is lost"),
             "GPU 1 (GPU-1) does not answer after the launch"),
    "silent": (without_driver("devices_after"), "answered before the launch and not after it"),
    "standing uncorrected": (standing("counters", ecc_uncorrected_volatile=1), "GPU 1: "),
    "standing pending": (standing("counters", remap_pending=1), "GPU 1: "),
    "spare rows used up": (standing("counters", remap_failure=1), "GPU 1: "),
    "retirement": (standing("counters", retired_pending=1), "GPU 1: "),
    "standing narrow": (standing("link", width=8), "GPU 1: "),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_of_the_machine_is_invalid_and_named(what: str) -> None:
    change, said = FAULTS[what]
    check = says(checked(change), MACHINE, said, remedy="do not use these numbers")
    assert check.reason.startswith("run2: ") and check.measurement is not None
    # A number that was taken on it does not count either.
    says(checked(change, "throughput"), MACHINE, "these launches do not count")


# The launch began at 23:59:54 and ended at 00:00:10.
BEGAN, ENDED = "2025-12-31T23:59:54Z", "2026-01-01T00:00:10Z"
OWN_TIMES = {
    "devices_before.taken_at": BEGAN,
    "devices_after.taken_at": ENDED,
    "kernel_log.began_at": BEGAN,
    "kernel_log.ended_at": ENDED,
}


@pytest.mark.parametrize("place", OWN_TIMES)
def test_documents_that_tell_of_another_time_prove_nothing(place: str) -> None:
    def moved(seconds: float) -> Change:
        then = datetime.fromisoformat(OWN_TIMES[place]) + timedelta(seconds=seconds)
        return at(place, utc_text(then))

    assert checked(moved(40.0)).outcome is Outcome.PASS
    for seconds in (-10.0, 90.0):
        says(checked(moved(seconds)), OTHERWISE, "is of another time", "the launch ")
    assert checked(moved(-86400.0), "throughput").outcome is Outcome.INVALID


@pytest.mark.parametrize("days", [-30, -1 / 24, 1 / 24])
@pytest.mark.parametrize("what", ["devices", "gpu_utilisation"])
def test_samples_of_another_time_prove_nothing(what: str, days: float) -> None:
    def redated(table: pd.DataFrame) -> Any:
        shifted = pd.to_datetime(table["timestamp"]) + pd.Timedelta(days=days)
        return shifted.dt.strftime("%Y/%m/%d %H:%M:%S.%f").str[:-3]

    says(checked(sampled(timestamp=redated), what), OTHERWISE, "gpu_samples.csv is of another time")


def resting(frame: pd.DataFrame) -> pd.Series[float]:
    """The link of a GPU that rests before and after the steps."""
    return (frame["utilization_percent"] > 50).map({True: 4.0, False: 1.0})


def others_than_used(kept: int) -> Change:
    gpus = at("devices_before.gpus", lambda found: found[:kept])
    return both(gpus, at("env.device", uuids=["0", "1"]))


CORRECTED = "nvidia 0000:17:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer"
OOM = "Out of memory: Killed process 9 (stress) total-vm:1kB"
SHAPELESS = {"source": None, "problem": "", "gpus": [], "lines": []}
DOCUMENTS = ("devices_before", "devices_after", "kernel_log")
FAR = [logged(XID.format(address, 79)) for address in ("0000:3b:00", "0000:99:00")]
STOPPED = both(without_driver("devices_after"), spoil.ended(LaunchStatus.INTERRUPTED))
STAND = "the numbers stand"
SAID: dict[str, tuple[Change, tuple[Outcome, Reason], str]] = {
    # What is no fault.
    "a repaired card": (standing("counters", ecc_uncorrected_aggregate=12,
                                 remapped_uncorrectable=3), FINE, ""),
    "a link at rest": (sampled(pcie_gen=resting), FINE, ""),
    "clocks at rest": (sampled(sm_clock_mhz=210.0, utilization_percent=40.0), FINE, ""),
    "clocks just high enough": (sampled(sm_clock_mhz=850.0), FINE, ""),
    "a limit close to the card's own": (standing("power", limit_w=286), FINE, ""),
    "a limit above it": (standing("power", limit_w=310), FINE, ""),
    "another GPU's": (FAR[0], FINE, ""),
    "the GPU of nobody": (FAR[1], FINE, ""),
    "no step": (spoil.parts(gpu_samples=None, ranks=()), FINE, "took no step"),
    "interrupted": (STOPPED, WARNED, ""),
    # What does not decide is a warning and never silent.
    "corrected": (counted("ecc_corrected_volatile", 3), WARNED, "ecc_corrected_volatile 0 -> 3"),
    "a replay": (counted("pcie_replays", 8), WARNED, "0 -> 8; allowed in this time: 8"),
    "warm": (counted("thermal_violation_s", 0.5), WARNED, "thermal_violation_s 0 -> 0.5"),
    "silent counter": (counted("pcie_replays", None), WARNED,
                       "pcie_replays could be read before and not"),
    "corrected link": (logged(CORRECTED), WARNED, "severity=Corrected"),
    "oom": (logged(OOM), WARNED, "Killed process 9"),
    "no kernel log": (logged(source="", problem="/dev/kmsg: denied"), WARNED,
                      "unreadable: /dev/kmsg: den"),
    "lost": (logged(lost=True), WARNED, "overwritten before it was read"),
    "flood": (logged(left_out=9), WARNED, "9 more lines"),
    "one sample of another process": (
        sampled(other_processes=lambda t: [float(row == 120) for row in range(len(t))]), WARNED,
        "in 1 samples"),
    "samples of other cards": (sampled(uuid="GPU-7"), WARNED, "GPU 1 was not sampled while"),
    "no samples": (spoil.parts(gpu_samples=None), WARNED, "the GPUs were not sampled"),
    "no clock": (sampled(sm_clock_mhz=math.nan), WARNED,
                 "GPU 0: its SM clock, or the highest, was not t"),
    "no driver": (both(without_driver("devices_before"), without_driver("devices_after")), WARNED,
                  "counters of the GPUs are unreadable: no NVIDIA driver; no nvidia-smi"),
    # What proves nothing.
    **{f"counters of {kept}": (others_than_used(kept), OTHERWISE, "does not tell of GPU ")
       for kept in (0, 1)},
    **{f"taken at {text!r}": (at("devices_after.taken_at", text), DAMAGED, "does not tell taken_at")
       for text in ("", "yesterday", None, "2026-01-01T00:00:00")},
    **{f"no {key}": (at(key, None), NOTHING, f"no {key}.json") for key in DOCUMENTS},
    **{f"{key} without {what}": (at(key, document), DAMAGED, "") for key in DOCUMENTS
       for what, document in (("anything", {}), ("its parts", SHAPELESS))},
}  # fmt: skip


@pytest.mark.parametrize("what", SAID)
def test_what_else_the_row_says_of_a_launch(what: str) -> None:
    change, wanted, words = SAID[what]
    check = says(checked(change, only="run1"), wanted, words)
    if wanted is WARNED and what != "interrupted":
        assert check.remedy.startswith(STAND)
    if wanted is NOTHING:
        assert checked(change, "throughput").outcome is Outcome.PASS


NEVER_TOLD = sampled(other_processes=math.nan)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "22 counters of GPU 0, 1 compared by nvml"),
        (None, "no fault in the kernel log (/dev/kmsg)"),
        (FAR[0], "1 line(s) about other devices"),
        (NEVER_TOLD, "whose processes compute was not told"),
    ],
)
def test_what_passes_says_by_what(change: Change | None, words: str) -> None:
    check = says(answers.row("baseline", "devices", change, WHERE), FINE, words)
    assert check.measurement is not None and check.measurement.value == 0 and check.required


def test_a_profile_without_gpus_skips_the_row() -> None:
    assert not says(answers.row("baseline", "devices", where=CPU), NEEDS_CUDA).required


def test_a_crash_by_hardware_is_invalid_in_its_own_row() -> None:
    change = spoil.ended(LaunchStatus.HARDWARE_ERROR, cause="GPU 0000:17:00: Xid 79 (...)")
    says(checked(change, "completed"), MACHINE, "hardware error", "Xid 79")


# Other work on the machine is a warning of a timed launch, and never more than that.


def worked(**others: Any) -> Change:
    return at("load", machine_files.load(**others))


@pytest.mark.parametrize(
    ("change", "wanted", "words"),
    [
        (None, FINE, "load average up to 2.1"),
        (worked(others_s=24.0), FINE, ""),
        (worked(others_s=25.0), WARNED, "of 2 CPUs"),
        (worked(others_s=13.0, steal_s=12.0), WARNED, "of 2 CPUs"),
        (at("load", None), UNTOLD, "not recorded"),
        (at("load", {"problem": "the kernel tells no times"}), UNTOLD, "tells no times"),
        (at("load", others_s=None), UNTOLD, "not recorded"),
        (at("load", total_s=0.0), UNTOLD, "not recorded"),
        (both(worked(others_s=90.0), spoil.result(status=LaunchStatus.HUNG)), UNTOLD,
         "did not finish"),
    ],
)  # fmt: skip
def test_other_work_is_told_with_its_share(
    change: Change | None, wanted: tuple[Outcome, Reason], words: str
) -> None:
    found = says(answers.row("baseline", "other_work", change, CPU, only=["run1"]), wanted, words)
    assert not found.required
    if wanted is WARNED:
        assert found.remedy.startswith("end the other work")
        assert found.evidence == ("baseline/run1/load.json",)
    if change is None:
        assert found.measurement.value == pytest.approx(1 / 120, abs=1e-4)
