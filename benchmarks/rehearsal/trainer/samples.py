"""gpu_samples.csv of a rehearsed launch: every GPU of the machine, as the sampler keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.trainer.beats import Rank
from benchmarks.rehearsal.trainer.steps import seed_of

# The context of CUDA, NCCL and libraries, which no tensor shows, MiB.
_CONTEXT_MIB = 620
_EVERY_S = 0.2


def write_samples(
    path: Path, columns: Sequence[str], rank: Rank, stop: int, machine: Machine
) -> None:
    """Five samples a second of every GPU of the machine, from the launch's start to its end."""
    steps, job = rank.steps, rank.job
    ends = steps.device_end_s[:stop]
    over = float(ends[-1]) if stop else 0.0
    random = np.random.default_rng(seed_of(job.where, rank.token, "samples"))
    at = np.arange(-12.0, over + 1.2, _EVERY_S)
    place = np.searchsorted(ends, at)
    rows = [",".join(columns)]
    for when, number in zip(at, place, strict=True):
        then = rank.began_s + rank.wall_s + when + 86_400.0 * machine.samples_days
        stamp = datetime.fromtimestamp(then, tz=UTC)
        text = f"{stamp:%Y/%m/%d %H:%M:%S}.{stamp.microsecond // 1000:03d}"
        trains = 0.0 <= when <= over and number < stop
        for index in range(machine.gpus):
            used = trains and index < job.ranks
            share = float(steps.busy[number, index]) if used else 0.0
            told = _sample(machine, rank, index, text, share, number, random)
            # What only NVML could tell stays empty.
            rows.append(",".join(told.get(name, "") for name in columns))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def _sample(
    machine: Machine,
    rank: Rank,
    index: int,
    stamp: str,
    share: float,
    step: int,
    random: np.random.Generator,
) -> dict[str, str]:
    """One line, as the sampler keeps it: utilization is the share of time with a kernel running."""
    card, pace = machine.card, machine.trains(index)
    busy = min(100, max(0, round(100 * share + random.normal(0, 1.2)))) if share else 0
    taken = index < rank.job.ranks and step >= 0
    used = _CONTEXT_MIB + rank.memory(max(1, step))[2] if taken else 4
    gpu = machine.at_rest(index)
    slow = pace.clock < 0.95 and share > 0
    told = 0x4 if gpu.power_limit_w else 0x0 if index in machine.held_mhz else 0x40
    reason = told if slow else 0x0 if share else 0x1
    clock = card.sm_mhz * pace.clock if share else 210
    loaded = machine.loaded_generation or gpu.pcie_gen_max
    return {
        "timestamp": stamp,
        "index": str(index),
        "utilization_percent": str(busy),
        "memory_used_mib": f"{used:.0f}",
        "memory_total_mib": str(card.memory_mib),
        "power_w": f"{card.power_w * (0.2 + 0.6 * share * pace.clock):.2f}",
        "temperature_c": str(round(34 + 30 * share)),
        "sm_clock_mhz": f"{clock:.0f}",
        "throttle_reasons": f"0x{reason:016X}",
        "pcie_gen": str(loaded if share else gpu.pcie_gen),
        "pcie_width": str(gpu.pcie_width),
        "uuid": gpu.uuid,
        "source": "nvml",
    }
