"""What the harness finds of a sound machine beside a launch: GPUs, kernel log, load, by hand."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd

from runbook.files import utc_text
from runbook.folder.launch.shapes import DEVICE_COUNTERS
from tests.phases.heartbeats import BEGAN_AT

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
            "memory_total_mib": 81_920.0,
        }
    )
    return frame.assign(
        throttle_reasons="0x0000000000000004",
        sm_clock_mhz=np.repeat(np.where(training, 1290.0, 210.0), gpus),
        pcie_gen=4.0,
        pcie_width=16.0,
        uuid="GPU-" + frame["index"].astype(str),
        source="nvml",
        own_processes=1.0,
        own_utilization_percent=busy,
        own_memory_mib=used_mib,
        other_processes=0.0,
        unknown_processes=0.0,
        others="",
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
            "index": gpu,
            "uuid": f"GPU-{gpu}",
            "name": "NVIDIA A100 80GB PCIe",
            "pci": f"0000{slot(gpu)}.0".upper(),
            "pci_path": [f"0000:{0x56 + gpu:02x}:01"],
            "mig": False,
            "counters": dict(counters),
            "link": {"gen": 1, "gen_max": 4, "width": 16, "width_max": 16},
            "power": {"limit_w": 300.0, "default_w": 300.0},
            "sm_max_mhz": 1410,
            "clock_events": 1,
            "missing": {"retired_pending": "Not Supported"},
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
    document = {"schema_version": 1, "source": "/dev/kmsg", "problem": "", "lost": False}
    document |= {"began_at": STARTED_AT, "ended_at": STARTED_AT}
    return {**document, "others": 3, "left_out": 0, "lines": list(lines), **changes}


def no_devices() -> dict[str, Any]:
    """What is written where there is no driver."""
    return {**devices(0), "source": "", "problem": "no NVIDIA driver; no nvidia-smi"}


def load(*, others_s: float = 1.0, steal_s: float = 0.0) -> dict[str, Any]:
    """A minute on two CPUs, in which others worked for so long."""
    return {
        "schema_version": 1,
        "problem": "",
        "cpus": 2,
        "wall_s": 60.0,
        "total_s": 120.0,
        "busy_s": 100.0 + others_s,
        "own_s": 100.0,
        "others_s": others_s,
        "steal_s": steal_s,
        "load_before": [0.5, 0.4, 0.3],
        "load_after": [2.1, 1.0, 0.5],
    }
