"""ceilings.json: what `nsa.ceilings` would measure of the rehearsed devices and links.

The ceilings are of the same roofline as the steps, so a card that is slow in training is slow here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.trainer.rundir import TORCH
from nsa.contract import HEARTBEATS, Ceiling
from tests.phases.ceiling_files import measured

# Shares of the data sheet's peak: a product of large matrices, a copy, a copy over PCIe.
PRODUCT_SHARE, COPY_SHARE, HOST_SHARE = 0.79, 0.87, 0.8
# PCI-SIG: GB per second and lane in each direction, by generation.
LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938}
# Four bytes in 26 us.
LATENCY_GB_S = 4e-9 / 2.6e-5


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
    for event, phase, at in told:
        record = {
            "event": event, "ts": 1_767_240_000.0 + at, "mono": 500.0 + at, "rank": rank,
            "pid": 4_295_000 + rank, "token": token, "step": 0, "phase": phase,
            "rss_mib": 1900.0, "cuda_mib": 9000.0,
        }  # fmt: skip
        if event == "exit":
            record |= {"code": 0, "reason": "everything is measured", "steps_done": 0}
        yield record
