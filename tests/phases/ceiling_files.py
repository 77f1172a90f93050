"""A ceilings.json made by hand, of devices that are as fast as one wants."""

from __future__ import annotations

from typing import Any

from nsa.contract import Ceiling
from runbook.config.profile import Profile
from runbook.records import Launch
from tests.phases.heartbeats import TOKEN

# What healthy devices are seen with; an A100 behind PCIe 4 unless its profile says otherwise.
_SEEN = {
    "A100": (240.0, 1650.0, 25.0),
    "H100 80GB HBM3": (700.0, 2950.0, 50.0),
    "H200": (780.0, 4300.0, 50.0),
    "B200": (1700.0, 7000.0, 50.0),
    None: (0.05, 10.0, 1.0),
}
_LATENCY_S = 20e-6


def healthy_rates(profile: Profile) -> dict[Ceiling, float]:
    """Rates of a healthy machine of this profile."""
    hardware = profile.hardware
    matmul, memory, host = _SEEN[hardware.gpu_name]
    link = {True: 200.0 if hardware.gpu_name == "B200" else 130.0, False: 14.0, None: 1.0}[
        hardware.nvlink
    ]
    slow = 2.0 if hardware.pcie_gen == 3 else 1.0
    return {
        Ceiling.MATMUL: matmul,
        Ceiling.MEMORY_COPY: memory,
        Ceiling.HOST_COPY: host / slow,
        Ceiling.ALL_REDUCE: link / slow,
        Ceiling.LATENCY: 4e-9 / _LATENCY_S,
    }


# What one call does, in the unit's multiples: 8192 cubed, 2 GiB read and written, 256 MiB; of an
# all-reduce of N ranks 2 (N - 1) / N of its bytes pass each link, of two every byte once.
_WORK = {
    Ceiling.MATMUL: 2 * 8192**3 / 1e12,
    Ceiling.MEMORY_COPY: 2 * 2**31 / 1e9,
    Ceiling.HOST_COPY: 2**28 / 1e9,
    Ceiling.ALL_REDUCE: 2**28 / 1e9,
    Ceiling.LATENCY: 4 / 1e9,
}


def measured(what: Ceiling, rate: float, nproc: int = 2) -> dict[str, Any]:
    """Ten repeats of five calls of so many ranks at a rate, with a percent between them."""
    work = _WORK[what]
    if what in (Ceiling.ALL_REDUCE, Ceiling.LATENCY):
        work *= 2 * (nproc - 1) / nproc
    seconds = [work / rate * (1 + 0.002 * (repeat % 5 - 2)) for repeat in range(10)]
    sizes = {"bytes": 2**28}
    if what is Ceiling.MATMUL:
        sizes = {"size": 8192}
    elif what is Ceiling.MEMORY_COPY:
        sizes = {"bytes": 2**31}
    elif what is Ceiling.LATENCY:
        sizes = {"bytes": 4}
    kind = {"dtype": "bf16"} if what is Ceiling.MATMUL else {}
    return {
        **sizes,
        **kind,
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
    return {
        "schema_version": 1,
        "run_token": TOKEN,
        "world_size": launch.nproc,
        "versions": {"torch": "2.13.0", "cuda": "13.0" if profile.has_gpu else None},
        "ranks": [
            {
                "rank": rank,
                "device": {
                    "type": profile.hardware.device,
                    "name": profile.hardware.gpu_name or "some processor",
                    "uuid": f"{rank}" if profile.has_gpu else None,
                },
                **found,
            }
            for rank in range(launch.nproc)
        ],
    }
