"""What the harness finds of a sound machine beside a launch: GPUs, kernel log, load, by hand."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd

from nsa.contract import Ceiling
from phases.machine.device_changes import DEVICE_COUNTERS
from runbook.config import Profile
from runbook.files import utc_text
from runbook.records import Launch
from tests.phases.trainer import BEGAN_AT, HEALTHY, TOKEN

# The first step begins so many seconds after the launch.
BOOT_S = 6.0


def at(seconds: float) -> str:
    """The time so many seconds after the launch began."""
    return utc_text(datetime.fromtimestamp(BEGAN_AT - BOOT_S + seconds, tz=UTC))


STARTED_AT = at(0.0)


def gpu_samples(gpus: int, *, used_mib: float = 4e4, trains_s: float = 8.192) -> pd.DataFrame:
    """What NVML showed, five times a second: a start of 11 s, training, an end of 1 s.

    Of a long training every thousandth part is shown.
    """
    every_s = max(0.2, trains_s / 1000)
    at = np.arange(-11.0, trains_s + 1.0, every_s)
    stamps = pd.to_datetime(BEGAN_AT + at, unit="s")
    text = [stamp[:-3] for stamp in stamps.strftime("%Y/%m/%d %H:%M:%S.%f")]
    training = (at > 0.0) & (at <= trains_s + 0.5)
    frame = pd.DataFrame({"timestamp": np.repeat(text, gpus)})
    return frame.assign(
        index=np.tile(np.arange(gpus), len(at)),
        utilization_percent=np.repeat(np.where(training, 95.0, 2.0), gpus),
        memory_used_mib=used_mib,
        **HEALTHY["sampled"],
        sm_clock_mhz=np.repeat(np.where(training, 1290.0, 210.0), gpus),
        uuid=lambda table: "GPU-" + table["index"].astype(str),
    )


def devices(gpus: int) -> dict[str, Any]:
    """What healthy GPUs count, before a launch and after it."""
    counters = {**dict.fromkeys(DEVICE_COUNTERS, 0), "ecc_uncorrected_aggregate": 7}
    counters["power_violation_s"] = None
    found = [
        {
            **copy.deepcopy(HEALTHY["device"]),
            "index": gpu,
            "uuid": f"GPU-{gpu}",
            "pci": f"00000000:{0x17 + gpu:02X}:00.0",
            "pci_path": [f"0000:{0x56 + gpu:02x}:01"],
            "counters": dict(counters),
        }
        for gpu in range(gpus)
    ]
    told = {"schema_version": 1, "source": "nvml", "problem": "", "taken_at": STARTED_AT}
    return {**told, "driver": HEALTHY["env"]["versions"]["driver"], "gpus": found}


def no_devices() -> dict[str, Any]:
    """What is written where there is no driver."""
    return {**devices(0), "source": "", "problem": "no NVIDIA driver; no nvidia-smi"}


# A ceilings.json made by hand, of devices that are as fast as one wants.

_LATENCY_S = 20e-6


def healthy_rates(profile: Profile) -> dict[Ceiling, float]:
    """Rates of a healthy machine of this profile."""
    hardware = profile.hardware
    matmul, memory, host = HEALTHY["rates"][hardware.gpu_name]
    nvlink = 200.0 if hardware.gpu_name == "B200" else 130.0
    link = {True: nvlink, False: 14.0, None: 1.0}[hardware.nvlink]
    slow = 2.0 if hardware.pcie_gen == 3 else 1.0
    return {
        Ceiling.MATMUL: matmul,
        Ceiling.MEMORY_COPY: memory,
        Ceiling.HOST_COPY: host / slow,
        Ceiling.ALL_REDUCE: link / slow,
        Ceiling.LATENCY: 4e-9 / _LATENCY_S,
    }


# Of one call its size, and what it does in the unit's multiples: 8192 cubed, 2 GiB read and
# written, 256 MiB; of an all-reduce of N ranks 2 (N - 1) / N of its bytes pass each link, of two
# every byte once.
_CALLS: dict[Ceiling, tuple[dict[str, Any], float]] = {
    Ceiling.MATMUL: ({"size": 8192, "dtype": "bf16"}, 2 * 8192**3 / 1e12),
    Ceiling.MEMORY_COPY: ({"bytes": 2**31}, 2 * 2**31 / 1e9),
    Ceiling.HOST_COPY: ({"bytes": 2**28}, 2**28 / 1e9),
    Ceiling.ALL_REDUCE: ({"bytes": 2**28}, 2**28 / 1e9),
    Ceiling.LATENCY: ({"bytes": 4}, 4 / 1e9),
}


def measured(what: Ceiling, rate: float, nproc: int = 2) -> dict[str, Any]:
    """Ten repeats of five calls of so many ranks at a rate, with a percent between them."""
    sizes, work = _CALLS[what]
    if what in (Ceiling.ALL_REDUCE, Ceiling.LATENCY):
        work *= 2 * (nproc - 1) / nproc
    seconds = [work / rate * (1 + 0.002 * (repeat % 5 - 2)) for repeat in range(10)]
    return {
        **sizes,
        "inner": 5,
        "seconds": seconds,
        "host_s": 5 * sum(seconds) * 1.01,
        "rate": rate,
        "unit": "TFLOP/s" if what is Ceiling.MATMUL else "GB/s",
    }


def document(launch: Launch, profile: Profile, **rates: float) -> dict[str, Any]:
    """What healthy devices of the profile leave; `matmul=100.0` is the rate of every rank."""
    has = dict.fromkeys(Ceiling, True)
    has[Ceiling.HOST_COPY] = profile.has_gpu
    has[Ceiling.ALL_REDUCE] = has[Ceiling.LATENCY] = launch.nproc > 1
    seen = {**healthy_rates(profile), **{Ceiling(name): rate for name, rate in rates.items()}}
    found = {
        what: measured(what, seen[what], launch.nproc) if has[what] else None for what in Ceiling
    }
    device = {
        "type": profile.hardware.device,
        "name": profile.hardware.gpu_name or "some processor",
    }
    return {
        "schema_version": 1,
        "run_token": TOKEN,
        "world_size": launch.nproc,
        "versions": {"torch": "2.13.0", "cuda": "13.0" if profile.has_gpu else None},
        "ranks": [
            {"rank": rank, "device": {**device, "uuid": uuid}, **found}
            for rank in range(launch.nproc)
            for uuid in [f"{rank}" if profile.has_gpu else None]
        ],
    }
