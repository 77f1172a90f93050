"""Samples NVIDIA's management library in a process of its own: it may hang when a card is gone.

Run by path with `python -P nvml.py EVERY_MS`; standard library and `pynvml` only. It prints a CSV
row for each GPU and time until it is killed, or in a line why the driver cannot be asked (exit code
3).
"""

from __future__ import annotations

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
_LONGEST_NAME = 40


def main(argv: list[str]) -> int:
    """Sample at the interval of the command line; returns the exit code."""
    try:
        import pynvml
    except ImportError as error:
        return _no_driver(f"pynvml cannot be imported: {error}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _no_driver(f"NVML: {error}")
    every_s = int(argv[1]) / 1000
    sampler = Samples(pynvml, os.environ.get(_TOKEN_VARIABLE, ""))
    parent = os.getppid()
    while os.getppid() == parent:  # it ends with the harness, however that went
        began = time.monotonic()
        for row in sampler.rows():
            sys.stdout.write(",".join(row) + "\n")
        sys.stdout.flush()
        time.sleep(max(0.0, began + every_s - time.monotonic()))
    return 0


def _no_driver(problem: str) -> int:
    sys.stdout.write(f"{problem}\n")
    return NO_DRIVER


def clock_events(nvml: Any, device: Any) -> int:
    """Bits of what holds the clocks back, by the name that this driver knows (535 renamed it)."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(device))
    except (nvml.NVMLError, AttributeError):
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))


class Samples:
    """Rows of `gpu_samples.csv`, in the order of its columns; an empty field is not known."""

    def __init__(self, nvml: Any, token: str, *, proc: Path = Path("/proc")) -> None:
        self._nvml, self._token, self._proc = nvml, token, proc
        devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._devices = [(device, str(nvml.nvmlDeviceGetUUID(device))) for device in devices]

    def rows(self) -> Iterator[list[str]]:
        """One row for each GPU, now."""
        for index, (device, uuid) in enumerate(self._devices):
            yield [*self._device(index, device), uuid, "nvml", *self._processes(device)]

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

    def _processes(self, device: Any) -> list[str]:
        """How many processes of others compute there, and which.

        A process that carries the launch's token is ours. One that does not is another's, and so
        is one that may not be read. Behind the border of a container a number may mean nothing:
        one without a process counts as another's only where ours were recognized too.
        """
        found = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(device))
        if found is None:
            return ["", ""]
        owners = {process.pid: self._owner(process.pid) for process in found}
        counted = {"other", "unknown"} if "own" in owners.values() else {"other"}
        others = [pid for pid, owner in owners.items() if owner in counted]
        return [str(len(others)), ";".join(f"{pid} {self._name(pid)}".strip() for pid in others)]

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
