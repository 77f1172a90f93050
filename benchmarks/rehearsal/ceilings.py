"""ceilings.json: what `nsa.ceilings` would measure of the rehearsed devices and links.

The ceilings are of the same roofline as the steps, so a card that is slow in training is slow here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.rundir import TORCH
from benchmarks.rehearsal.steps import seed_of
from nsa.contract import HEARTBEATS

# Shares of the data sheet's peak: a product of large matrices, a copy, a copy over PCIe.
PRODUCT_SHARE, COPY_SHARE, HOST_SHARE = 0.79, 0.87, 0.8
# PCI-SIG: bytes per second and lane in each direction, by generation.
LANE_BYTES_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9}
LATENCY_S = 2.6e-5
_MIB = 2**20
REPEATS, INNER, LATENCY_INNER = 10, 5, 20


def write_ceilings(folder: Path, machine: Machine, ranks: int, token: str) -> float:
    """Write the document and the ranks' heartbeats; returns how long it took, in s."""
    document = {
        "schema_version": 1,
        "run_token": token,
        "world_size": ranks,
        "versions": {"torch": TORCH[machine.torch_cuda], "cuda": machine.torch_cuda},
        "ranks": [_rank(machine, rank, ranks) for rank in range(ranks)],
    }
    (folder / "ceilings.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    for rank in range(ranks):
        lines = [json.dumps(record) for record in _beats(rank, token)]
        (folder / HEARTBEATS.name(rank)).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 19.0


def _rank(machine: Machine, rank: int, ranks: int) -> dict[str, Any]:
    card, pace, gpu = machine.card, machine.pace(rank), machine.at_rest(rank)
    random = np.random.default_rng(seed_of(machine.name, "ceilings", rank))
    generation = machine.loaded_generation or gpu.pcie_gen_max
    host = LANE_BYTES_S[generation] * gpu.pcie_width * HOST_SHARE
    sizes = {"memory_copy": 2048, "host_copy": 256, "all_reduce": 256, **machine.copied_mib}
    copied, moved, reduced = (size * _MIB for size in sizes.values())
    share = 2.0 * (ranks - 1) / ranks

    def one(
        name: str, work: float, per_s: float, unit: str, scale: float, **what: Any
    ) -> dict[str, Any]:
        per_s *= machine.told_rates.get(name, 1.0)
        inner = what.pop("inner", INNER)
        # Repeats of the same call differ by some thousandths.
        times = [work / per_s * float(f) for f in np.exp(random.normal(0, 0.003, REPEATS))]
        return {
            **what,
            "inner": inner,
            "seconds": times,
            "host_s": sum(times) * inner * 1.01 + 2e-5,
            "rate": work / float(np.median(times)) / scale,
            "unit": unit,
        }

    product = card.bf16_tflops * 1e12 * PRODUCT_SHARE * pace.clock
    memory = card.memory_gb_s * 1e9 * COPY_SHARE * pace.memory
    found: dict[str, Any] = {
        "rank": rank,
        "device": {
            "type": "cuda",
            "name": card.name,
            "uuid": machine.uuid(rank).removeprefix("GPU-"),
        },
        "matmul": one("matmul", 2.0 * 8192**3, product, "TFLOP/s", 1e12, dtype="bf16", size=8192),
        "memory_copy": one("memory_copy", 2.0 * copied, memory, "GB/s", 1e9, bytes=copied),
        "host_copy": one("host_copy", float(moved), host, "GB/s", 1e9, bytes=moved),
        "all_reduce": None,
        "all_reduce_latency": None,
    }
    if ranks > 1:
        link = machine.link_bytes_s
        many = {"bytes": reduced, "ranks": ranks}
        few = {"bytes": 4, "ranks": ranks, "inner": LATENCY_INNER}
        found["all_reduce"] = one("all_reduce", reduced * share, link, "GB/s", 1e9, **many)
        found["all_reduce_latency"] = one(
            "latency", 4 * share, 4 * share / LATENCY_S, "GB/s", 1e9, **few
        )
    return found


def _beats(rank: int, token: str) -> Iterator[dict[str, Any]]:
    """boot, init_done, the beginning of each measurement, exit."""
    told = [("boot", "init", 0.0), ("init_done", "init", 7.0)]
    told += [("ceiling_start", "step", 8.0 + 2.0 * number) for number in range(5)]
    told.append(("exit", "exit", 18.0))
    for event, phase, at in told:
        record = {
            "event": event, "ts": 1_767_240_000.0 + at, "mono": 500.0 + at, "rank": rank,
            "pid": 4_295_000 + rank, "token": token, "step": 0, "phase": phase,
            "rss_mib": 1900.0, "cuda_mib": 9000.0,
        }  # fmt: skip
        if event == "exit":
            record |= {"code": 0, "reason": "everything is measured", "steps_done": 0}
        yield record
