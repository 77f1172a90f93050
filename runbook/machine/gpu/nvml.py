"""Reads NVIDIA's management library in a process of its own: it may hang when a card is gone.

Run by path with `python -P nvml.py counters` or `nvml.py samples EVERY_MS`; standard library and
`pynvml` only. `counters` prints one JSON object, `samples` a CSV row for each GPU and time until it
is killed. A driver that cannot be asked is `{"problem": ...}` and exit code 3.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NO_DRIVER = 3
# As in nsa.contract, which a program without the project's packages cannot import.
_TOKEN_VARIABLE = "RUNBOOK_RUN_TOKEN"  # noqa: S105 - the name of a variable
_MIB = 1024 * 1024
_NS_PER_S = 1_000_000_000
_LONGEST_NAME = 40


def main(argv: list[str]) -> int:
    """Answer one question of the command line; returns the exit code."""
    try:
        import pynvml
    except ImportError as error:
        return _no_driver(f"pynvml cannot be imported: {error}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _no_driver(f"NVML: {error}")
    if argv[1] == "counters":
        sys.stdout.write(json.dumps(read_counters(pynvml)) + "\n")
        return 0
    every_s = int(argv[2]) / 1000
    sampler = Samples(pynvml, os.environ.get(_TOKEN_VARIABLE, ""))
    while True:
        began = time.monotonic()
        for row in sampler.rows():
            sys.stdout.write(",".join(row) + "\n")
        sys.stdout.flush()
        time.sleep(max(0.0, began + every_s - time.monotonic()))


def _no_driver(problem: str) -> int:
    sys.stdout.write(json.dumps({"problem": problem}) + "\n")
    return NO_DRIVER


# -- counters --------------------------------------------------------------------------------------


def read_counters(nvml: Any) -> dict[str, Any]:
    """Driver, and of every GPU its counters and link; what a GPU does not tell stands in `missing`.

    Keys as in docs/artifacts.md. A GPU that cannot be opened has only its index and `problem`.
    """
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_gpu(nvml, index))
        except nvml.NVMLError as error:
            gpus.append({"index": index, "problem": str(error)})
    return {"problem": "", "driver": _text(nvml.nvmlSystemGetDriverVersion()), "gpus": gpus}


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    missing: dict[str, str] = {}

    def ask(name: str, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except (nvml.NVMLError, AttributeError) as error:  # an older pynvml lacks newer questions
            missing[name] = str(error)
            return None

    def answers(questions: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        return {name: ask(name, question) for name, question in questions.items()}

    uuid = _text(nvml.nvmlDeviceGetUUID(device))
    told = {
        "counters": answers(_counters(nvml, device)),
        "link": answers(_link(nvml, device)),
        "power": answers(_power(nvml, device)),
        **answers(_itself(nvml, device)),
    }
    return {"index": index, "uuid": uuid, **told, "missing": missing}


def _itself(nvml: Any, device: Any) -> dict[str, Callable[[], Any]]:
    return {
        "name": lambda: _text(nvml.nvmlDeviceGetName(device)),
        "pci": lambda: _text(nvml.nvmlDeviceGetPciInfo(device).busId),
        "mig": lambda: bool(nvml.nvmlDeviceGetMigMode(device)[0]),
        "sm_max_mhz": lambda: int(nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM)),
        "clock_events": lambda: clock_events(nvml, device),
    }


def clock_events(nvml: Any, device: Any) -> int:
    """Bits of what holds the clocks back, by the name that this driver knows (535 renamed it)."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(device))
    except (nvml.NVMLError, AttributeError):
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))


def _counters(nvml: Any, device: Any) -> dict[str, Callable[[], Any]]:
    def ecc(kind: str, span: str) -> Callable[[], int]:
        number = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}")
        since = getattr(nvml, f"NVML_{span}_ECC")
        return lambda: int(nvml.nvmlDeviceGetTotalEccErrors(device, number, since))

    def remapped(place: int) -> Callable[[], int]:
        return lambda: int(nvml.nvmlDeviceGetRemappedRows(device)[place])

    def retired(cause: str) -> Callable[[], int]:
        number = getattr(nvml, f"NVML_PAGE_RETIREMENT_CAUSE_{cause}")
        return lambda: len(nvml.nvmlDeviceGetRetiredPages(device, number))

    def held_back(policy: str) -> Callable[[], float]:
        number = getattr(nvml, f"NVML_PERF_POLICY_{policy}")
        return lambda: nvml.nvmlDeviceGetViolationStatus(device, number).violationTime / _NS_PER_S

    return {
        "ecc_corrected_volatile": ecc("CORRECTED", "VOLATILE"),
        "ecc_uncorrected_volatile": ecc("UNCORRECTED", "VOLATILE"),
        "ecc_corrected_aggregate": ecc("CORRECTED", "AGGREGATE"),
        "ecc_uncorrected_aggregate": ecc("UNCORRECTED", "AGGREGATE"),
        "remapped_correctable": remapped(0),
        "remapped_uncorrectable": remapped(1),
        "remap_pending": remapped(2),
        "remap_failure": remapped(3),
        "retired_single_bit": retired("MULTIPLE_SINGLE_BIT_ECC_ERRORS"),
        "retired_double_bit": retired("DOUBLE_BIT_ECC_ERROR"),
        "retired_pending": lambda: int(nvml.nvmlDeviceGetRetiredPagesPendingStatus(device)),
        "pcie_replays": lambda: int(nvml.nvmlDeviceGetPcieReplayCounter(device)),
        "power_violation_s": held_back("POWER"),
        "thermal_violation_s": held_back("THERMAL"),
    }


def _link(nvml: Any, device: Any) -> dict[str, Callable[[], Any]]:
    return {
        "gen": lambda: int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(device)),
        "gen_max": lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(device)),
        "width": lambda: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(device)),
        "width_max": lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(device)),
    }


def _power(nvml: Any, device: Any) -> dict[str, Callable[[], Any]]:
    return {
        "limit_w": lambda: nvml.nvmlDeviceGetPowerManagementLimit(device) / 1000,
        "default_w": lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(device) / 1000,
    }


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


# -- samples ---------------------------------------------------------------------------------------


class Samples:
    """Rows of `gpu_samples.csv`, in the order of its columns; an empty field is not known."""

    def __init__(self, nvml: Any, token: str, *, proc: Path = Path("/proc")) -> None:
        self._nvml, self._token, self._proc = nvml, token, proc
        devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._devices = [(device, _text(nvml.nvmlDeviceGetUUID(device))) for device in devices]
        self._seen_us = [int(time.time() * 1e6)] * len(devices)

    def rows(self) -> Iterator[list[str]]:
        """One row for each GPU, now."""
        for index, (device, uuid) in enumerate(self._devices):
            yield [*self._device(index, device), uuid, "nvml", *self._processes(index, device)]

    def _device(self, index: int, device: Any) -> list[str]:
        nvml = self._nvml
        use = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu)
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(device))
        watt = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000)
        celsius = self._ask(
            lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
        )
        clock = self._ask(lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM))
        events = self._ask(lambda: clock_events(nvml, device))
        now = time.time()
        stamp = time.strftime("%Y/%m/%d %H:%M:%S", time.gmtime(now))
        values = [
            use,
            None if memory is None else memory.used // _MIB,
            None if memory is None else memory.total // _MIB,
            watt,
            celsius,
            clock,
            None if events is None else f"0x{events:016x}",
            self._ask(lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(device)),
            self._ask(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(device)),
        ]
        return [f"{stamp}.{int(now % 1 * 1000):03d}", str(index), *map(_field, values)]

    def _processes(self, index: int, device: Any) -> list[str]:
        """How many of ours compute there, their utilization and memory, and who else does.

        A process that carries the launch's token is ours. One that does not is another's, and so
        is one that may not be read. Behind the border of a container a number may mean nothing:
        one without a process counts as another's only where ours were recognized too.
        """
        found = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(device))
        if found is None:
            return [""] * 6
        own = [process for process in found if self._owner(process.pid) == "own"]
        others = [process for process in found if self._owner(process.pid) == "other"]
        unknown = [p for p in found if p not in own and p not in others]
        if own:
            others, unknown = others + unknown, []
        held = [process.usedGpuMemory for process in own]
        memory = None if None in held else sum(held) // _MIB
        pids = {process.pid for process in own}
        named = ";".join(f"{process.pid} {self._name(process.pid)}".strip() for process in others)
        counts = [len(own), self._busy(index, device, pids), memory, len(others), len(unknown)]
        return [*map(_field, counts), named]

    def _busy(self, index: int, device: Any, pids: set[int]) -> float | None:
        """Utilization of our processes together, a mean over the samples since the last row."""
        samples = self._ask(
            lambda: self._nvml.nvmlDeviceGetProcessUtilization(device, self._seen_us[index])
        )
        if not samples:
            return None
        self._seen_us[index] = max(self._seen_us[index], *(s.timeStamp for s in samples))
        means = []
        for pid in pids:
            shares = [sample.smUtil for sample in samples if sample.pid == pid]
            if shares:
                means.append(sum(shares) / len(shares))
        return round(sum(means), 1) if means else None

    def _owner(self, pid: int) -> str:
        try:
            variables = (self._proc / str(pid) / "environ").read_bytes().split(b"\0")
        except PermissionError:
            return "other"
        except OSError:
            return "unknown"
        return "own" if f"{_TOKEN_VARIABLE}={self._token}".encode() in variables else "other"

    def _name(self, pid: int) -> str:
        try:
            name = (self._proc / str(pid) / "comm").read_text("utf-8", "replace")
        except OSError:
            return ""
        return "".join(
            c if c.isalnum() or c in "._-" else "_" for c in name.strip()[:_LONGEST_NAME]
        )

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except (self._nvml.NVMLError, AttributeError):
            return None


def _field(value: object) -> str:
    return "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
