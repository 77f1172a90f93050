"""The proof of a rehearsed launch: known gradients through its ranks, the model recomputed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.steps import Job, seed_of
from tests.accounts.first_weights import first_weights

GROUPS = (
    "embedding", "attention_norm", "attention.gate_bias", "attention.q", "attention.k_cmp",
    "attention.k_sel", "attention.k_win", "attention.v_cmp", "attention.v_sel", "attention.v_win",
    "attention.gates", "attention.out_proj", "mlp_norm", "mlp.gate_up", "mlp.down", "norm",
)  # fmt: skip
# Fine details that every rank sends in the place of its gradients.
_FINE = (0.0, 2.0**-5, 2.0**-9, 2.0**-14)


def proof(machine: Machine, job: Job, rank: int, mean_loss: float) -> Mapping[str, Any]:
    """What the known numbers came out as, and the model against its equations.

    mean_loss: of the ranks, at the step of the proof.
    """
    ranks = job.ranks
    compressed = job.ddp and job.blocks[0].settings.get("NSA_DDP_COMPRESS", "off") == "bf16"
    sent = np.array([1.0 + fine for fine in _FINE], dtype=np.float32)
    arrived = _reduced(machine, job, rank, sent, compressed)
    wanted = float(np.mean(np.arange(1, ranks + 1)))
    error = arrived / wanted - sent
    count = job.shape.parameters
    norm = math.sqrt(count * float(np.mean(arrived.astype(float) ** 2)))
    loss = mean_loss + 0.004 * (rank - (ranks - 1) / 2)
    sizes = {g: 1e-3 / (1 + seed_of(g) % 90) * (1 + 0.1 * rank) for g in GROUPS}
    return {
        "loss": round(loss, 7),
        "loss_again": round(loss + 3e-7, 7),
        "positions": job.per_rank * job.shape.seq_len,
        "own_gradient": sizes,
        "mean_low": 1.0 + float(error.min()),
        "mean_high": 1.0 + float(error.max()),
        "wire": "bf16" if compressed else "fp32",
        "missing": [],
        "norm_told": round(norm * (1 - 1e-5), 4),
        "norm_before": round(norm, 4),
        "norm_after": 1.0,
        "logit_gradient": 2e-3,
        "oracle": _oracle(machine, job),
        "weights": first_weights(
            {"config": job.config, "effective": {"vocab_size": job.shape.vocabulary}}
        ),
    }


def _reduced(
    machine: Machine, job: Job, rank: int, sent: np.ndarray, compressed: bool
) -> np.ndarray:
    """The mean over the ranks of (rank + 1) times these numbers, in the wire's type."""
    parts = [sent * (number + 1) / job.ranks for number in range(job.ranks)]
    if machine.gradient == "own" and job.ranks > 1:
        parts = [sent * (rank + 1)]
    if compressed:
        parts = [_bf16(part) for part in parts]
    total: np.ndarray = np.sum(np.stack(parts), axis=0, dtype=np.float32)
    if machine.gradient == "sum":
        total = total * job.ranks
    return _bf16(total) if compressed else total


def _oracle(machine: Machine, job: Job) -> Mapping[str, Any]:
    off = machine.attention_error
    last = job.shape.seq_len - 1
    return {
        "positions": [round(last * part / 7) for part in range(8)],
        "shape": {**job.config["model"], **job.config["nsa"]},
        "embedding": 0.0,
        "attention": off,
        "gates": off * 0.5,
        "layer": off * 0.8,
        "logits": off * 1.1,
        "blocks_illegal": 0.0,
        "blocks_shortfall": 0.0,
        "layers": float(job.shape.layers),
        "seams": 0.0,
    }


def _bf16(numbers: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16: the upper half of a float32, to the nearest even."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    up = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    return ((bits + up) & np.uint32(0xFFFF0000)).view(np.float32)
