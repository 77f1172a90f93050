"""What a healthy rank tells: each step, its proofs, its optimizer, its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from runbook.accounts import GeneratedData

# Of the text of its first documents.
TEXT = {"documents": 2, "bytes": 129, "read": "5e", "decoded": "5e", "apart": None}
# Random numbers of a small vocabulary, a sequence for each of two ranks.
DATA = GeneratedData(
    kind="synthetic", seed=1, vocab_size=256, seq_len=128, nproc=2, rows=1, accumulation=1
)
# Of a layer's gates: entropy, largest share, and the shares.
GATES = (0.95, 0.4, 0.4, 0.35, 0.25)


# The known numbers that travelled, the norm before and after clipping, and the loss's gradient.
PROOF: Mapping[str, Any] = {
    "mean_low": 0.998,
    "mean_high": 1.0,
    "missing": [],
    "norm_told": 3.0,
    "norm_before": 3.0,
    "norm_after": 1.0,
    "logit_gradient": 1e-6,
}
# A whole model that is exactly the equations'.
ORACLE: Mapping[str, Any] = {
    **dict.fromkeys(("embedding", "attention", "layer", "logits", "gates", "slope"), 0.0),
    **dict.fromkeys(("blocks_illegal", "blocks_shortfall", "seams"), 0.0),
}


def first_pass(
    loss: float, *, positions: int, own_gradient: Mapping[str, float], wire: str, **told: Any
) -> dict[str, Any]:
    """What a rank proves; positions: tokens of a pass; wire: the type in which gradients travel."""
    exact = {"mean_low": 1.0} if wire == "fp32" else {}
    proof = {**PROOF, **exact, "loss": loss, "positions": positions}
    return proof | {"own_gradient": own_gradient, "wire": wire, **told}


def told_steps(
    table: pd.DataFrame, *, began: float, data: Sequence[str], **told: Any
) -> pd.DataFrame:
    """What its heartbeats tell of the steps of a CSV; began: s, of the first; told: columns."""
    ends = began + table["dt_s"].cumsum()
    # A table of times alone tells of no waiting.
    fetched = table["fetch_s"] if "fetch_s" in table else pd.Series(2.5e-4, index=table.index)
    return pd.DataFrame(
        {
            "step": table["step"],
            "mono": ends,
            "alone": True,
            "data": data,
            "loss": table["loss"],
            "toks_per_s": table["toks_per_s"],
            "grad_norm": table["grad_norm"],
            "fetch_s": fetched,
            "fetch_clock_s": fetched + 3e-5,
            "timed_from": ends - table["dt_s"],
            **told,
        }
    )


def shadow(steps: Sequence[int]) -> dict[str, Any]:
    """Its optimizer in the watched steps: how far from AdamW's, in roundoffs."""
    off = {"weight": 1.6, "first_moment": 2.8, "second_moment": 4.7, "norm": 4e-7, "rate": 0.0}
    return {"steps": list(steps), **off, "jumps": 0, "left": 0}


def recomputed(steps: Sequence[int], table: pd.DataFrame, *, layers: int = 12) -> dict[str, Any]:
    """The steps that it computes twice: with the losses and norms of the CSV."""
    losses = dict(zip(table["step"], table["loss"], strict=True))
    norms = dict(zip(table["step"], table["grad_norm"], strict=True))
    ended = [step for step in steps if step in losses]
    return {
        "steps": ended,
        "losses": [losses[step] for step in ended],
        "norms": [norms[step] for step in ended],
        "gradient": 1e-6,
        "ranks": 0.0,
        "bias": {"toward_zero": 1e-4, "down": -1e-4, "weight": 900.0},
        "gates": [[list(GATES)] * layers for _ in ended],
    }


def in_force(nproc: int, variables: Mapping[str, str], *, cpus: int = 16) -> dict[str, Any]:
    """The timeout and the threads that the variables ask for; torchrun asks for one thread."""
    asked = {"OMP_NUM_THREADS": "1", **variables} if nproc > 1 else variables
    threads = asked.get("OMP_NUM_THREADS")
    minutes = float(asked.get("NSA_PG_TIMEOUT_MIN", "15"))
    return {
        "timeout_s": 60 * minutes if nproc > 1 else None,
        "threads": int(threads or cpus // 2),
        "cpus": cpus,
        "variables": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": None},
    }
