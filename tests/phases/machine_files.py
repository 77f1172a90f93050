"""What the harness finds of a sound machine beside a launch: GPUs, kernel log, load, by hand."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd

from runbook.files import utc_text
from runbook.folder.launch.shapes import DEVICE_COUNTERS
from tests.phases.heartbeats import BEGAN_AT, HEALTHY

DRIVER = "580.95.05"
# The first step begins so many seconds after the launch.
BOOT_S = 6.0
STARTED_AT = utc_text(datetime.fromtimestamp(BEGAN_AT - BOOT_S, tz=UTC))


def gpu_samples(
    gpus: int,
    *,
    busy: float = 95.0,
    used_mib: float = 40_000.0,
    trains_s: float = 8.192,
) -> pd.DataFrame:
    """What NVML showed, five times a second: a start of 11 s, training, an end of 1 s.

    Of a long training every thousandth part is shown.
    """
    every_s = max(0.2, trains_s / 1000)
    at = np.arange(-11.0, trains_s + 1.0, every_s)
    stamps = pd.to_datetime(BEGAN_AT + at, unit="s")
    text = [stamp[:-3] for stamp in stamps.strftime("%Y/%m/%d %H:%M:%S.%f")]
    training = (at > 0.0) & (at <= trains_s + 0.5)
    frame = pd.DataFrame(
        {
            "timestamp": np.repeat(text, gpus),
            "index": np.tile(np.arange(gpus), len(at)),
            "utilization_percent": np.repeat(np.where(training, busy, 2.0), gpus),
            "memory_used_mib": used_mib,
        }
    )
    return frame.assign(
        **HEALTHY["sampled"],
        sm_clock_mhz=np.repeat(np.where(training, 1290.0, 210.0), gpus),
        uuid="GPU-" + frame["index"].astype(str),
        own_utilization_percent=busy,
        own_memory_mib=used_mib,
    )


def slot(gpu: int) -> str:
    """The PCI place of a GPU."""
    return f"0000:{0x17 + gpu:02x}:00"


def devices(gpus: int) -> dict[str, Any]:
    """What healthy GPUs count, before a launch and after it."""
    counters = {**dict.fromkeys(DEVICE_COUNTERS, 0), "ecc_uncorrected_aggregate": 7}
    counters |= dict.fromkeys(("retired_single_bit", "retired_double_bit", "retired_pending"))
    found = [
        {
            **copy.deepcopy(HEALTHY["device"]),
            "index": gpu,
            "uuid": f"GPU-{gpu}",
            "pci": f"0000{slot(gpu)}.0".upper(),
            "pci_path": [f"0000:{0x56 + gpu:02x}:01"],
            "counters": dict(counters),
        }
        for gpu in range(gpus)
    ]
    return {
        "schema_version": 1,
        "source": "nvml",
        "problem": "",
        "driver": DRIVER,
        "taken_at": STARTED_AT,
        "gpus": found,
    }


def kernel_log(*lines: str, **changes: Any) -> dict[str, Any]:
    """What the kernel logged while a launch ran."""
    times = {"began_at": STARTED_AT, "ended_at": STARTED_AT}
    return {**HEALTHY["kernel_log"], **times, "lines": list(lines), **changes}


def no_devices() -> dict[str, Any]:
    """What is written where there is no driver."""
    return {**devices(0), "source": "", "problem": "no NVIDIA driver; no nvidia-smi"}


def load(*, others_s: float = 1.0, steal_s: float = 0.0) -> dict[str, Any]:
    """A minute on two CPUs, in which others worked for so long."""
    told = {"busy_s": 100.0 + others_s, "others_s": others_s, "steal_s": steal_s}
    return {**copy.deepcopy(HEALTHY["load"]), **told}
