"""Gradients: every rank's arrives, as their mean, reaches every parameter and is clipped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runbook.accounts.model import at_most, oracle_tolerance
from runbook.accounts.workload import Workload
from runbook.folder.launch.shapes import is_any_number, is_count
from runbook.records.evidence import Effect, RankLog

if TYPE_CHECKING:
    import pandas as pd

# What a mean of known numbers may be off by after it traveled in a type.
WIRE_TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
_COMPRESSED = ("attention.k_cmp", "attention.v_cmp", "compress")
# No type rounds a number by more; 8 bits keep 3 of its digits or 2.
_COARSE = 0.25
# A norm of millions of float32 numbers, against the same in float64.
NORM_TOLERANCE = 1e-2


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
    # Of numbers that did not come out at their size nobody can tell how finely they were sent.
    sized = _near(low, _COARSE) and _near(high, _COARSE)
    if sized and work.wire is not None and wire != work.wire:
        problems.append(f"{who}: gradients travel as {wire}, not as {work.wire}")
    off, most = proof.get("logit_gradient"), oracle_tolerance(work)
    # fp16's scaler tries factors that are too large, and leaves such a step out.
    if not at_most(off, most) and not (off is None and work.dtype == "fp16"):
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


def _may_idle(group: str, work: Workload) -> bool:
    """A sequence with fewer than two compressed blocks has nothing to choose among."""
    return work.seq_len < 2 * work.block and group.startswith(_COMPRESSED)


def _near(value: object, allowed: float) -> bool:
    return isinstance(value, int | float) and abs(value - 1.0) <= allowed


def exchange_account(ranks: Sequence[RankLog]) -> list[str]:
    """Gradients are exchanged once a step, when the sum of all its micro-batches is there.

    As the hook that compresses them counts their bytes; without one nobody does.
    """
    counts = {rank.rank: [_exchanges(effect) for effect in rank.effects] for rank in ranks}
    return [
        f"rank {rank} exchanges its gradients {odd[0]:g} times in a step, not once after its last "
        "micro-batch"
        for rank, told in counts.items()
        if (odd := [one for one in told if one != 1])
    ]


def _exchanges(effect: Effect) -> float:
    """How often in a step the hook was given all gradients; 1 where the effect is another's."""
    told = effect.evidence if isinstance(effect.evidence, Mapping) else {}
    found = (told.get(name) for name in ("bytes_before", "bytes_of_gradients", "steps"))
    counts = [float(one) for one in found if isinstance(one, int) and is_count(one)]
    if effect.toggle != "NSA_DDP_COMPRESS" or len(counts) < 3:
        return 1.0
    sent, once, steps = counts
    return sent / (once * steps) if once * steps else 1.0


def left_over_account(ranks: Sequence[RankLog]) -> list[str]:
    """No watched step began with a gradient, to which its own would have been added."""
    told = {rank.rank: rank.ending.get("shadow") or {"left": 0} for rank in ranks}
    return [
        f"rank {number}: gradients of the step before are still there when a step begins: "
        f"{shadow.get('left')} of the elements watched"
        for number, shadow in told.items()
        if shadow.get("left") != 0
    ]


def norm_account(ranks: Sequence[RankLog]) -> list[str]:
    """Every step that reported one had a gradient at all: in no step is its norm 0."""
    problems = []
    for rank in ranks:
        if rank.steps is None or "grad_norm" not in rank.steps:
            continue
        none = rank.steps["step"][rank.steps["grad_norm"] == 0]
        if len(none):
            problems.append(
                f"rank {rank.rank}: the gradient norm is 0 in {len(none)} steps, first "
                f"{none.iloc[0]:.0f}"
            )
    return problems


def told_norm_account(frame: pd.DataFrame, ranks: Sequence[RankLog]) -> list[str]:
    """The CSV's norms are those of the gradients, in the steps whose gradients were looked at.

    Launches of before these norms were kept do not tell them.
    """
    if "grad_norm" not in frame:
        return []  # said by `column_account`
    told = dict(zip(frame["step"].tolist(), frame["grad_norm"].tolist(), strict=True))
    problems = []
    for rank in ranks:
        again = rank.ending.get("recomputed") or {}
        steps, norms = again.get("steps") or (), again.get("norms") or ()
        known = [
            (step, norm)
            for step, norm in zip(steps, norms, strict=False)
            if is_any_number(norm) and norm
        ]
        apart = [
            (step, norm)
            for step, norm in known
            if not abs(told.get(step, math.nan) / norm - 1) <= NORM_TOLERANCE
        ]
        if apart:
            step, norm = apart[0]
            problems.append(
                f"the CSV's grad_norm of step {step} is {told.get(step, math.nan):.5g}; that of "
                f"rank {rank.rank}'s gradients was {norm:.5g} ({len(apart)} of {len(known)} steps "
                "differ)"
            )
    return problems


def clip_account(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """The norm that the trainer tells is that of its gradients, and what exceeds it is clipped."""
    problems = []
    for rank in ranks:
        names = ("norm_told", "norm_before", "norm_after")
        said = [(rank.proof or {}).get(name) for name in names]
        if work.dtype == "fp16" and said[0] is None:
            continue  # under a gradient scaler nothing is clipped twice
        norms = [float(norm) for norm in said if isinstance(norm, int | float) and norm > 0]
        if len(norms) < len(names):
            problems.append(f"rank {rank.rank} does not show that gradients are clipped")
            continue
        told, before, after = norms
        wanted = min(before, work.grad_clip) if work.grad_clip else before
        if abs(told / before - 1) > NORM_TOLERANCE:
            problems.append(f"rank {rank.rank} tells a norm of {told:g} for {before:g}")
        if abs(after / wanted - 1) > NORM_TOLERANCE:
            problems.append(
                f"rank {rank.rank} clips a norm of {before:g} to {after:g}, not to {wanted:g}"
            )
    return problems
