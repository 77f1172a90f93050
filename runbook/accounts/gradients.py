"""Gradients: every rank's arrives, as their mean, reaches every parameter and is clipped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from runbook.accounts import Workload, apart, computed_twice, each_rank, within
from runbook.accounts.model import oracle_tolerance
from runbook.folder.launch.shapes import is_any_number, is_count
from runbook.records.evidence import Effect, RankLog

if TYPE_CHECKING:
    import pandas as pd

# What a mean of known numbers may be off by after it traveled in a type.
WIRE_TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
_COMPRESSED = ("attention.k_cmp", "attention.v_cmp", "compress")
# Micro-batches add up in float32, in which the first one's numbers are exact.
_KEPT = 1e-6
# No type rounds a number by more; 8 bits keep 3 of its digits or 2.
_COARSE = 0.25
# A norm of millions of float32 numbers, against the same in float64.
NORM_TOLERANCE = 1e-2


@each_rank
def gradient_account(rank: RankLog, work: Workload) -> Iterator[str]:
    """Known numbers sent by every rank came out as their mean, in the type that was asked for.

    Before the first step and after the last one.
    """
    yield from _proof_problems("", rank.proof, work)
    yield from _proof_problems(" at the end", rank.ending.get("proof"), work)


@each_rank
def logit_account(rank: RankLog, work: Workload) -> Iterator[str]:
    """What the loss sends back to its logits is the gradient of the cross entropy's mean."""
    ending, most = rank.ending.get("proof"), oracle_tolerance(work)
    for when, proof in (("", rank.proof), (" at the end", ending)):
        if proof is None:
            continue  # said by `gradient_account`
        off = proof.get("logit_gradient")
        # fp16's scaler tries factors that are too large, and leaves such a step out.
        if not within(off, most) and not (off is None and work.dtype == "fp16"):
            yield (
                f"{when}: the gradient of its logits is off by {off} of that of the cross entropy, "
                f"allowed {most:.2g}"
            )


def _proof_problems(when: str, proof: Mapping[str, Any] | None, work: Workload) -> Iterator[str]:
    if proof is None:
        yield f"{when} proves nothing about its gradients"
        return
    low, high, wire = (proof.get(name) for name in ("mean_low", "mean_high", "wire"))
    allowed = WIRE_TOLERANCE.get(work.wire or str(wire), 0.0)
    if not isinstance(proof.get("missing"), list):
        yield f"{when} does not say which parameters got no gradient"
    elif proof["missing"]:
        yield f"{when}: no gradient for {', '.join(map(str, proof['missing']))}"
    if not max(apart(low, 1.0), apart(high, 1.0)) <= allowed:
        yield f"{when}: the mean of known gradients came out as {low} to {high} of itself"
    # Of numbers that did not come out at their size nobody can tell how finely they were sent.
    sized = max(apart(low, 1.0), apart(high, 1.0)) <= _COARSE
    if sized and work.wire is not None and wire != work.wire:
        yield f"{when}: gradients travel as {wire}, not as {work.wire}"
    # One micro-batch keeps none, and earlier runs did not tell.
    kept = proof.get("kept")
    if kept is not None and not within(kept, _KEPT):
        yield (
            f"{when}: a micro-batch's gradient is off by {kept} of itself when the next one is "
            f"added, allowed {_KEPT:g}"
        )
    own: Mapping[str, float] = proof.get("own_gradient") or {}
    # Infinite only where fp16 scales its loss up.
    most = math.nextafter(math.inf, 0) if work.dtype != "fp16" else math.inf
    # A sequence with fewer than two compressed blocks has nothing to choose among.
    may = _COMPRESSED if work.seq_len < 2 * work.block else ()
    idle = [
        name
        for name, size in own.items()
        if not 0 < size <= most and not (size == 0 and name.startswith(may))
    ]
    if idle or not own:
        yield f"{when}: no gradient reaches {', '.join(idle) or 'anything'}"


@each_rank
def exchange_account(rank: RankLog) -> Iterator[str]:
    """Gradients are exchanged once a step, when the sum of all its micro-batches is there.

    As the hook that compresses them counts their bytes; without one nobody does.
    """
    if odd := [one for one in map(_exchanges, rank.effects) if one != 1]:
        yield (
            f" exchanges its gradients {odd[0]:g} times in a step, not once after its last "
            "micro-batch"
        )


def _exchanges(effect: Effect) -> float:
    """How often in a step the hook was given all gradients; 1 where the effect is another's."""
    told = effect.evidence if isinstance(effect.evidence, Mapping) else {}
    found = (told.get(name) for name in ("bytes_before", "bytes_of_gradients", "steps"))
    counts = [float(one) for one in found if isinstance(one, int) and is_count(one)]
    if effect.toggle != "NSA_DDP_COMPRESS" or len(counts) < 3:
        return 1.0
    sent, once, steps = counts
    return sent / (once * steps) if once * steps else 1.0


@each_rank
def left_over_account(rank: RankLog) -> Iterator[str]:
    """No watched step began with a gradient, to which its own would have been added."""
    left = (rank.ending.get("shadow") or {"left": 0}).get("left")
    if left != 0:
        yield (
            ": gradients of the step before are still there when a step begins: "
            f"{left} of the elements watched"
        )


@each_rank
def norm_account(rank: RankLog) -> Iterator[str]:
    """Every step that reported one had a gradient at all: in no step is its norm 0."""
    if rank.steps is None or "grad_norm" not in rank.steps:
        return
    none = rank.steps["step"][rank.steps["grad_norm"] == 0]
    if len(none):
        yield f": the gradient norm is 0 in {len(none)} steps, first {none.iloc[0]:.0f}"


@each_rank
def told_norm_account(frame: pd.DataFrame, rank: RankLog) -> Iterator[str]:
    """The CSV's norms are those of the gradients, in the steps whose gradients were looked at.

    Launches of before these norms were kept do not tell them.
    """
    if "grad_norm" not in frame:
        return  # said by `column_account`
    twice = computed_twice(frame, "grad_norm", rank.ending.get("recomputed") or {}, "norms")
    known = [one for one in twice if is_any_number(one[2]) and one[2]]
    if off := [one for one in known if not abs(one[1] / one[2] - 1) <= NORM_TOLERANCE]:
        step, told, norm = off[0]
        yield (
            f": the CSV's grad_norm of step {step} is {told:.5g}, that of its gradients was "
            f"{norm:.5g} ({len(off)} of {len(known)} steps differ)"
        )


@each_rank
def clip_account(rank: RankLog, work: Workload) -> Iterator[str]:
    """The norm that the trainer tells is that of its gradients, and what exceeds it is clipped."""
    names = ("norm_told", "norm_before", "norm_after")
    said = [(rank.proof or {}).get(name) for name in names]
    if work.dtype == "fp16" and said[0] is None:
        return  # under a gradient scaler nothing is clipped twice
    norms = [float(norm) for norm in said if isinstance(norm, int | float) and norm > 0]
    if len(norms) < len(names):
        yield " does not show that gradients are clipped"
        return
    told, before, after = norms
    wanted = min(before, work.grad_clip) if work.grad_clip else before
    if abs(told / before - 1) > NORM_TOLERANCE:
        yield f" tells a norm of {told:g} for {before:g}"
    if abs(after / wanted - 1) > NORM_TOLERANCE:
        yield f" clips a norm of {before:g} to {after:g}, not to {wanted:g}"
