"""What the rehearsed devices show: ceilings.json, and gpu_samples.csv as the sampler keeps it.

The ceilings are of the same roofline as the steps, so a card that is slow in training is slow here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.trainer.beats import Rank
from benchmarks.rehearsal.trainer.rundir import TORCH
from benchmarks.rehearsal.trainer.steps import seed_of
from nsa.contract import Ceiling
from tests.factory.files import record, write_beats
from tests.phases.machine_files import gpu_samples, measured

# Shares of the data sheet's peak: a product of large matrices, a copy, a copy over PCIe.
PRODUCT_SHARE, COPY_SHARE, HOST_SHARE = 0.79, 0.87, 0.8
# PCI-SIG: GB per second and lane in each direction, by generation.
LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938}
# Four bytes in 26 us.
LATENCY_GB_S = 4e-9 / 2.6e-5


def write_ceilings(folder: Path, machine: Machine, ranks: int, token: str) -> None:
    """Write the document and the ranks' heartbeats."""
    document = {
        "schema_version": 1,
        "run_token": token,
        "world_size": ranks,
        "versions": {"torch": TORCH[machine.torch_cuda], "cuda": machine.torch_cuda},
        "ranks": [_rank(machine, rank, ranks) for rank in range(ranks)],
    }
    (folder / "ceilings.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    for rank in range(ranks):
        write_beats(folder, rank, _beats(rank, token))


def _rank(machine: Machine, rank: int, ranks: int) -> dict[str, Any]:
    card, pace, gpu = machine.card, machine.pace(rank), machine.at_rest(rank)
    generation = machine.loaded_generation or gpu.pcie_gen_max
    rates = {
        Ceiling.MATMUL: card.bf16_tflops * PRODUCT_SHARE * pace.clock,
        Ceiling.MEMORY_COPY: card.memory_gb_s * COPY_SHARE * pace.memory,
        Ceiling.HOST_COPY: LANE_GB_S[generation] * gpu.pcie_width * HOST_SHARE,
    }
    if ranks > 1:
        rates |= {Ceiling.ALL_REDUCE: machine.link_bytes_s / 1e9, Ceiling.LATENCY: LATENCY_GB_S}
    found: dict[str, Any] = dict.fromkeys(Ceiling)
    for what, rate in rates.items():
        found[what] = measured(what, rate * machine.told_rates.get(what, 1.0))
    for what, mib in machine.copied_mib.items():
        share = mib * 2**20 / found[what]["bytes"]
        seconds = [share * each for each in found[what]["seconds"]]
        found[what] |= {"bytes": mib * 2**20, "seconds": seconds, "host_s": 5.05 * sum(seconds)}
    uuid = machine.uuid(rank).removeprefix("GPU-")
    device = {"type": "cuda", "name": card.name, "uuid": uuid}
    return {"rank": rank, "device": device, **found}


def _beats(rank: int, token: str) -> Iterator[dict[str, Any]]:
    """boot, init_done, the beginning of each measurement, exit."""
    told = [("boot", "init", 0.0), ("init_done", "init", 7.0)]
    told += [("ceiling_start", "step", 8.0 + 2.0 * number) for number in range(5)]
    told.append(("exit", "exit", 18.0))
    own = {"rank": rank, "pid": 4_295_000 + rank, "token": token}
    own |= {"rss_mib": 1900.0, "cuda_mib": 9000.0}
    end = {"code": 0, "reason": "everything is measured", "steps_done": 0}
    for event, phase, at in told:
        more = own | (end if event == "exit" else {})
        yield record(event, mono=500.0 + at, ts=1_767_240_000.0 + at, phase=phase, **more)


# The context of CUDA, NCCL and libraries, which no tensor shows, MiB.
_CONTEXT_MIB = 620
_EVERY_S = 0.2
# Below this share of its clock a GPU tells why.
_SLOW = 0.95


def write_samples(path: Path, rank: Rank, stop: int, machine: Machine) -> None:
    """Five samples a second of every GPU of the machine, from the launch's start to its end.

    Utilization is the share of time with a kernel running; what only NVML could tell stays empty.
    """
    steps, job = rank.steps, rank.job
    ends = steps.device_end_s[:stop]
    over = float(ends[-1]) if stop else 0.0
    random = np.random.default_rng(seed_of(job.where, job.token, "samples"))
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
    samples.reindex(columns=samples.columns.union(gpu_samples(1).columns, sort=False)).to_csv(
        path, index=False
    )
