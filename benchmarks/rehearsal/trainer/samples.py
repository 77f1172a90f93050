"""gpu_samples.csv of a rehearsed launch: every GPU of the machine, as the sampler keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.trainer.beats import Rank
from benchmarks.rehearsal.trainer.steps import seed_of

# The context of CUDA, NCCL and libraries, which no tensor shows, MiB.
_CONTEXT_MIB = 620
_EVERY_S = 0.2
# Below this share of its clock a GPU tells why.
_SLOW = 0.95


def write_samples(
    path: Path, columns: Sequence[str], rank: Rank, stop: int, machine: Machine
) -> None:
    """Five samples a second of every GPU of the machine, from the launch's start to its end.

    Utilization is the share of time with a kernel running; what only NVML could tell stays empty.
    """
    steps, job = rank.steps, rank.job
    ends = steps.device_end_s[:stop]
    over = float(ends[-1]) if stop else 0.0
    random = np.random.default_rng(seed_of(job.where, rank.token, "samples"))
    at = np.arange(-12.0, over + 1.2, _EVERY_S)
    place = np.minimum(np.searchsorted(ends, at), max(0, stop - 1))
    trains = (at >= 0.0) & (at <= over) & (stop > 0)
    then = rank.began_s + rank.wall_s + at + 86_400.0 * machine.samples_days
    stamps = pd.to_datetime(then, unit="s").strftime("%Y/%m/%d %H:%M:%S.%f").str[:-3]
    reserved = np.array([rank.memory(max(1, int(step)))[2] for step in place])
    frames = []
    for index in range(machine.gpus):
        card, pace, gpu = machine.card, machine.trains(index), machine.at_rest(index)
        used = index < job.ranks
        share = np.where(trains, steps.busy[place, index], 0.0) if used else np.zeros(len(at))
        busy = share > 0
        told = 0x4 if gpu.power_limit_w else 0x0 if index in machine.held_mhz else 0x40
        reason = np.where(busy, told if pace.clock < _SLOW else 0x0, 0x1)
        frames.append(
            pd.DataFrame(
                {
                    "timestamp": stamps,
                    "index": index,
                    "utilization_percent": np.clip(
                        np.where(busy, 100 * share + random.normal(0, 1.2, len(at)), 0), 0, 100
                    ).round(),
                    "memory_used_mib": _CONTEXT_MIB + reserved if used else 4.0,
                    "memory_total_mib": card.memory_mib,
                    "power_w": card.power_w * (0.2 + 0.6 * share * pace.clock),
                    "temperature_c": (34 + 30 * share).round(),
                    "sm_clock_mhz": np.where(busy, card.sm_mhz * pace.clock, 210.0).round(),
                    "throttle_reasons": [f"0x{one:016X}" for one in reason],
                    "pcie_gen": np.where(
                        busy, machine.loaded_generation or gpu.pcie_gen_max, gpu.pcie_gen
                    ),
                    "pcie_width": gpu.pcie_width,
                    "uuid": gpu.uuid,
                    "source": "nvml",
                }
            )
        )
    samples = pd.concat(frames).sort_values(["timestamp", "index"], kind="stable")
    samples.reindex(columns=columns).to_csv(path, index=False)
