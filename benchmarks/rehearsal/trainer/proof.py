"""The proof of a rehearsed launch: known gradients through its ranks, the model recomputed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.trainer.steps import Job, seed_of
from tests.accounts.first_weights import first_weights
from tests.factory.told import ORACLE, PROOF

GROUPS = (
    "embedding", "attention_norm", "attention.gate_bias", "attention.q", "attention.k_cmp",
    "attention.k_sel", "attention.k_win", "attention.v_cmp", "attention.v_sel", "attention.v_win",
    "attention.gates", "attention.out_proj", "mlp_norm", "mlp.gate_up", "mlp.down", "norm",
)  # fmt: skip


def proof(machine: Machine, job: Job, rank: int, mean_loss: float) -> Mapping[str, Any]:
    """What the known numbers came out as, and the model against its equations.

    mean_loss: of the ranks, at the step of the proof.
    """
    ranks = job.ranks
    compressed = job.ddp and job.blocks[0].settings.get("NSA_DDP_COMPRESS", "off") == "bf16"
    # Known numbers of rank r are r + 1 times those of rank 0, so their mean is this times them.
    mean = (ranks + 1) / 2
    got = {"sum": float(ranks), "own": (rank + 1) / mean if ranks > 1 else 1.0}
    share = got.get(machine.gradient, 1.0)
    norm = round(PROOF["norm_before"] * share, 4)
    loss = round(mean_loss + 0.004 * (rank - (ranks - 1) / 2), 7)
    env = {"config": job.config, "effective": {"vocab_size": job.shape.vocabulary}}
    return {
        **PROOF,
        "loss": loss,
        "loss_again": loss,
        "positions": job.per_rank * job.shape.seq_len,
        "own_gradient": {g: 1e-3 / (1 + seed_of(g) % 90) * (1 + 0.1 * rank) for g in GROUPS},
        "mean_low": share * (PROOF["mean_low"] if compressed else 1.0),
        "mean_high": share,
        "wire": "bf16" if compressed else "fp32",
        "norm_told": norm,
        "norm_before": norm,
        "oracle": _oracle(machine, job),
        "weights": first_weights(env),
    }


def _oracle(machine: Machine, job: Job) -> Mapping[str, Any]:
    off = machine.attention_error
    last = job.shape.seq_len - 1
    return {
        **ORACLE,
        "positions": [round(last * part / 7) for part in range(8)],
        "shape": {**job.config["model"], **job.config["nsa"]},
        "attention": off,
        "gates": off * 0.5,
        "layer": off * 0.8,
        "logits": off * 1.1,
        "layers": float(job.shape.layers),
    }
