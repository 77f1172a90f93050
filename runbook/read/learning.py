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
# What is off by less than this share of a roundoff was computed in a wider type.
NARROW = 1 / 8
# Accumulated in float32, sums of some thousand products: 7e-7 for the smallest model.
FLOAT32_SUMS = 2e-5
# Adam moves a parameter by about the learning rate in every step, whatever its gradient.
MOVED_SHARE = 0.1
MOVED_MOST = 1.5
_COMPRESSED = ("attention.k_cmp", "attention.v_cmp", "compress")


def gradient_account(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """Known numbers sent by every rank came out as their mean, in the type that was asked for.

    Before the first step and after the last one.
    """
    problems = []
    for rank in ranks:
        for who, proof in (
            (f"rank {rank.rank}", rank.proof),
            (f"rank {rank.rank} at the end", rank.ending.get("proof")),
        ):
            problems += _proof_problems(who, proof, work)
    return problems


def _proof_problems(who: str, proof: Mapping[str, Any] | None, work: Workload) -> list[str]:
    if proof is None:
        return [f"{who} proves nothing about its gradients"]
    problems = []
    low, high, wire = (proof.get(name) for name in ("mean_low", "mean_high", "wire"))
    allowed = WIRE_TOLERANCE.get(work.wire or str(wire), 0.0)
    if not isinstance(proof.get("missing"), list):
        problems.append(f"{who} does not say which parameters got no gradient")
    elif proof["missing"]:
        problems.append(f"{who}: no gradient for {', '.join(map(str, proof['missing']))}")
    if not (_near(low, allowed) and _near(high, allowed)):
        problems.append(f"{who}: the mean of known gradients came out as {low} to {high} of itself")
    if work.wire is not None and wire != work.wire:
        problems.append(f"{who}: gradients travel as {wire}, not as {work.wire}")
    off, most = proof.get("logit_gradient"), oracle_tolerance(work)
    # fp16's scaler tries factors that are too large, and leaves such a step out.
    if not _at_most(off, most) and not (off is None and work.dtype == "fp16"):
        problems.append(
            f"{who}: the gradient of its logits is off by {off} of that of the cross entropy, "
            f"allowed {most:.2g}"
        )
    own: Mapping[str, float] = proof.get("own_gradient") or {}
    idle = [
        name
        for name, size in own.items()
        if not _sound(size, work) and not (size == 0 and _may_idle(name, work))
    ]
    if idle or not own:
        problems.append(f"{who}: no gradient reaches {', '.join(idle) or 'anything'}")
    return problems


def _sound(size: float, work: Workload) -> bool:
    """Above zero; infinite only where fp16 scales its loss up."""
    return size > 0 and (size < math.inf or work.dtype == "fp16")


def movement_account(ranks: Sequence[RankLog]) -> list[str]:
    """Every group of parameters moved, about as far as the learning rate lets it, on all ranks."""
    problems = []
    first: Mapping[str, float] = ranks[0].ending.get("moved") or {} if ranks else {}
    for rank in ranks[1:]:
        other = rank.ending.get("moved") or {}
        apart = [name for name in first if other.get(name) != first[name]]
        if other and apart:
            problems.append(
                f"rank {rank.rank}'s parameters moved otherwise than rank {ranks[0].rank}'s: "
                f"{', '.join(apart)}"
            )
    for rank in ranks:
        moved: Mapping[str, float] = rank.ending.get("moved") or {}
        rate = rank.ending.get("largest_lr")
        if not moved or not isinstance(rate, int | float):
            problems.append(f"rank {rank.rank} does not say how far its parameters moved")
            continue
        steps = 0 if rank.steps is None else len(rank.steps)
        still = [name for name, change in moved.items() if not change > MOVED_SHARE * rate]
        far = [n for n, change in moved.items() if not change <= MOVED_MOST * steps * rate]
        if still:
            problems.append(
                f"rank {rank.rank}: {len(still)} of {len(moved)} groups of parameters did not "
                f"move: {', '.join(still)} (largest learning rate {rate:g})"
            )
        elif far:
            problems.append(
                f"rank {rank.rank}: {', '.join(far)} moved further than {steps} steps of the "
                f"learning rate {rate:g} can"
            )
    return problems


def oracle_account(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """What each rank computed for its first and its last batch, against the equations in float64.

    The last one in fp32 only: trained weights make scores so large that what half types round
    off has no bound.
    """
    if not ranks:
        return ["no rank held a batch against the oracle"]
    proofs = [(f"rank {rank.rank}", "first", rank.proof) for rank in ranks]
    if work.dtype == "fp32":
        proofs += [(f"rank {rank.rank}", "last", rank.ending.get("proof")) for rank in ranks]
    return [text for who, when, proof in proofs for text in _spot_problems(who, when, proof, work)]


def _spot_problems(
    who: str, when: str, proof: Mapping[str, Any] | None, work: Workload
) -> list[str]:
    spots: Mapping[str, Any] = (proof or {}).get("oracle") or {}
    if not spots:
        return [f"{who} did not hold its {when} batch against the oracle"]
    allowed = oracle_tolerance(work)
    problems = [
        f"{who}: {what} is off by {spots.get(what)} of itself in the {when} batch, "
        f"allowed {limit:.2g}"
        for what, limit in {
            "embedding": 0.0,
            "attention": allowed,
            "gates": allowed,
            "layer": allowed,
            "logits": allowed,
            "blocks_shortfall": allowed,
        }.items()
        if not _at_most(spots.get(what), limit)
    ]
    least = NARROW * ROUNDOFF.get(work.dtype, 0.0)
    attention = spots.get("attention")
    if work.dtype != "fp32" and isinstance(attention, int | float) and attention < least:
        problems.append(
            f"{who}: attention is off by {attention} only: not computed in {work.dtype}"
        )
    if work.layers is not None and spots.get("layers") != work.layers:
        problems.append(f"{who}: {spots.get('layers')} layers ran, the config has {work.layers}")
    told = spots.get("shape") or {}
    other = [n for n, value in work.shape.items() if told.get(n) != value]
    if other:
        has, wanted = (
            ", ".join(f"{name}={values.get(name)}" for name in other)
            for values in (told, work.shape)
        )
        problems.append(f"{who}: the model has {has}, the config {wanted} ({when} batch)")
    if spots.get("seams") != 0:
        problems.append(f"{who}: {spots.get('seams')} modules get what the one before did not give")
    if spots.get("blocks_illegal") != 0:
        problems.append(f"{who}: {spots.get('blocks_illegal')} choices of blocks break the rules")
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
