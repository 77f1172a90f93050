"""Accounts of what the model computes and learns: gradients, movement, and the oracle's word."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from runbook.read.accounts import Workload
from runbook.records.evidence import RankLog

# What a mean of known numbers may be off by after it traveled in a type.
WIRE_TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
# Unit roundoff of what the products are computed in, and how often it may add up in one layer. On
# CUDA fp32 products run in TF32, which has the bits of fp16.
ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
ROUNDOFFS = 8
# Accumulated in float32, sums of some thousand products.
FLOAT32_SUMS = 1e-4
# Adam moves a parameter by about the learning rate in every step, whatever its gradient.
MOVED_SHARE = 0.1
_COMPRESSED = ("attention.k_cmp", "attention.v_cmp", "compress")


def gradient_account(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """Known numbers sent by every rank came out as their mean, in the type that was asked for."""
    problems = []
    for rank in ranks:
        who, proof = f"rank {rank.rank}", rank.proof
        if proof is None:
            problems.append(f"{who} proves nothing about its gradients")
            continue
        low, high, wire = (proof.get(name) for name in ("mean_low", "mean_high", "wire"))
        allowed = WIRE_TOLERANCE.get(work.wire or str(wire), 0.0)
        if not isinstance(proof.get("missing"), list):
            problems.append(f"{who} does not say which parameters got no gradient")
        elif proof["missing"]:
            problems.append(f"{who}: no gradient for {', '.join(map(str, proof['missing']))}")
        if not (_near(low, allowed) and _near(high, allowed)):
            problems.append(
                f"{who}: the mean of known gradients came out as {low} to {high} of itself"
            )
        if work.wire is not None and wire != work.wire:
            problems.append(f"{who}: gradients travel as {wire}, not as {work.wire}")
        own: Mapping[str, float] = proof.get("own_gradient") or {}
        idle = [
            name
            for name, size in own.items()
            if not 0 < size < math.inf and not (size == 0 and _may_idle(name, work))
        ]
        if idle or not own:
            problems.append(f"{who}: no gradient reaches {', '.join(idle) or 'anything'}")
    return problems


def movement_account(ranks: Sequence[RankLog]) -> list[str]:
    """Every group of parameters moved, about as far as the learning rate lets it."""
    problems = []
    for rank in ranks:
        moved: Mapping[str, float] = rank.ending.get("moved") or {}
        rate = rank.ending.get("largest_lr")
        if not moved or not isinstance(rate, int | float):
            problems.append(f"rank {rank.rank} does not say how far its parameters moved")
            continue
        still = [n for n, change in moved.items() if not MOVED_SHARE * rate < change < math.inf]
        if still:
            problems.append(
                f"rank {rank.rank}: {len(still)} of {len(moved)} groups of parameters did not "
                f"move: {', '.join(still)} (largest learning rate {rate:g})"
            )
    return problems


def oracle_account(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """What rank 0 computed for its first batch, against the equations in float64."""
    spots: Mapping[str, Any] = next(
        ((rank.proof or {}).get("oracle") or {} for rank in ranks if rank.rank == 0), {}
    )
    if not spots:
        return ["rank 0 did not hold its first batch against the oracle"]
    allowed = oracle_tolerance(work)
    problems = [
        f"{what} is off by {spots.get(what)} of itself, allowed {limit:.2g}"
        for what, limit in {
            "embedding": 0.0,
            "attention": allowed,
            "layer": allowed,
            "logits": allowed,
            "blocks_shortfall": allowed,
        }.items()
        if not _at_most(spots.get(what), limit)
    ]
    if spots.get("blocks_illegal") != 0:
        problems.append(f"{spots.get('blocks_illegal')} choices of blocks break the rules")
    return problems


def oracle_tolerance(work: Workload) -> float:
    """Error of one layer, as a share of its output, that the launch's types explain."""
    tf32 = work.device == "cuda" and work.dtype == "fp32"
    roundoff = ROUNDOFF.get("fp16" if tf32 else work.dtype, 0.0)
    return max(FLOAT32_SUMS, ROUNDOFFS * roundoff)


def _at_most(value: object, limit: float) -> bool:
    return isinstance(value, int | float) and 0 <= value <= limit


def _may_idle(group: str, work: Workload) -> bool:
    """A sequence with fewer than two compressed blocks has nothing to choose among."""
    return work.seq_len < 2 * work.block and group.startswith(_COMPRESSED)


def _near(value: object, allowed: float) -> bool:
    return isinstance(value, int | float) and abs(value - 1.0) <= allowed
