"""Gradients and updates: every rank's arrives, reaches every parameter and is clipped.

What the optimizer made of them is held against AdamW's equation in float64, and its rate against
the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nsa.contract.digests import recomputed_steps, watched_steps
from runbook.accounts import (
    COPY_TOLERANCE,
    Workload,
    apart,
    computed_twice,
    each_rank,
    within,
)
from runbook.accounts.model import ROUNDOFF, oracle_tolerance
from runbook.folder.launch.shapes import is_any_number, is_count
from runbook.records.evidence import Effect, Frame, RankLog

# What a mean of known numbers may be off by after it traveled in a type.
WIRE_TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
_COMPRESSED = ("attention.k_cmp", "attention.v_cmp", "compress")
# Micro-batches add up in float32, in which the first one's numbers are exact.
_KEPT = 1e-6
# No type rounds a number by more; 8 bits keep 3 of its digits or 2.
_COARSE = 0.25
# A norm of millions of float32 numbers, against the same in float64.
NORM_TOLERANCE = 1e-2
# The rate of a step follows from the config, and the cosine ends at this share of its peak.
COSINE_END = 0.1
# Adam moves a parameter by about the learning rate in every step, whatever its gradient.
MOVED_SHARE = 0.1
# Roundoffs of float32 that an update may be off by, as shares of the sizes that were added up:
# clipping rounds a gradient 5 times, so 9 for the first moment and 15 for the second (measured: 3
# and 5). A bias correction in float32 adds 10 in the first step. bf16 is off by 32,768.
UPDATE_ROUNDOFFS = 32.0
# The largest gap of each kind that the trainer tells, and what float32 explains of it.
_ALLOWED: Mapping[str, tuple[str, float]] = {
    "weight": ("weights after the update", UPDATE_ROUNDOFFS),
    "first_moment": ("the optimizer's first moment", UPDATE_ROUNDOFFS),
    "second_moment": ("the optimizer's second moment", UPDATE_ROUNDOFFS),
    "norm": ("the norm that clipping goes by", NORM_TOLERANCE),
    "rate": ("the optimizer's own learning rate", COPY_TOLERANCE),
}
# Of one rank; two in bf16 are off by 1 / 256 (measured), and may be by 5.7 of that.
_WIRE_ROUNDOFFS = 4
# Of the largest gap between the ranks: equal but for rounding. Two are equally far from their mean.
_AS_FAR = 0.99
# Roundoffs that errors of rounding to nearest never come to on average, and cut digits always do.
_BIAS = 1 / 4
_ROUNDED_ON_THE_WIRE = ("bf16", "fp16")
_ROUNDOFFS = ("weight", "first_moment", "second_moment")
# What an update takes beside gradient, clipping and moments.
_OF_WEIGHTS_ALONE = (
    " (norm, moments and told rate are right: left are which parameters decay, epsilon, the bias "
    "correction, the rate that is used, a formula other than AdamW's (AMSGrad's), what changes "
    "weights right after the update, and the weights' type)"
)
# Of one moment alone, with gradient, clipping and the other moment as they should be.
_OF_ONE_MOMENT = (
    " (gradient, clipping and the other moment are right: left are {beta} in the optimizer's "
    "param_groups, which is {value} all the time, and what writes to {name} of its state)"
)
_MOMENTS: Mapping[str, Mapping[str, str]] = {
    "first_moment": {"beta": "beta1", "value": "0.9", "name": "exp_avg"},
    "second_moment": {"beta": "beta2", "value": "0.95", "name": "exp_avg_sq"},
}


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
def told_norm_account(frame: Frame, rank: RankLog) -> Iterator[str]:
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


@each_rank
def update_account(rank: RankLog, work: Workload) -> Iterator[str]:
    """The optimizer counts as many updates as steps; fp16 may skip some, to find its scale."""
    updates = rank.ending.get("updates")
    if updates is None:
        yield " does not say how many updates its optimizer made"
    elif updates != [rank.last_step, rank.last_step] and work.dtype != "fp16":
        yield f": the optimizer counts {updates} updates in {rank.last_step} steps"


def rate_account(frame: Frame, env: Mapping[str, Any]) -> list[str]:
    """Column lr is what config and schedule make of every step.

    lr: a linear ramp over warmup_steps, then constant, or a cosine down to a tenth of the peak.
    """
    train, effective = (env.get("config") or {}).get("train") or {}, env.get("effective") or {}
    try:
        peak, ramp = float(train["lr"]), int(train["warmup_steps"])
        shape, total = str(train["lr_schedule"]), int(effective["schedule_steps"])
    except (KeyError, TypeError, ValueError):
        return ["env.json does not say which learning rates were planned"]
    if "lr" not in frame:
        return ["the CSV has no column lr"]
    for step, rate in zip(frame["step"], frame["lr"], strict=True):
        wanted = peak
        if step <= ramp:
            wanted = peak * step / ramp
        elif shape == "cosine":
            progress = min(1.0, (step - ramp) / max(1, total - ramp))
            cosine = 0.5 * (1 + math.cos(math.pi * progress))
            wanted = peak * (COSINE_END + (1 - COSINE_END) * cosine)
        if not abs(rate - wanted) <= COPY_TOLERANCE * peak:
            return [f"lr of step {step} is {rate:.6g}, planned is {wanted:.6g}"]
    return []


def warmup_account(frame: Frame, env: Mapping[str, Any]) -> list[str]:
    """Only a block of a schedule has a warm-up, at its beginning and as long as planned."""
    if "warmup" not in frame:
        return []
    planned = int((env.get("arms") or {}).get("warmup_steps") or 0)
    begins = [name for name in ("block", "arm") if name in frame]
    number = frame.groupby(begins).cumcount() if begins else frame.reset_index().index
    wrong = frame[frame["warmup"].astype(bool) != (number < planned)]
    if not len(wrong):
        return []
    return [
        f"{len(wrong)} steps, first {wrong['step'].iloc[0]}, are marked as warm-up or not against "
        f"the schedule, whose blocks begin with {planned} such steps"
    ]


@each_rank
def movement_account(rank: RankLog) -> Iterator[str]:
    """Every group of parameters moved, by more than a share of the learning rate."""
    moved: Mapping[str, float] = rank.ending.get("moved") or {}
    rate = rank.ending.get("largest_lr")
    if not moved or not isinstance(rate, int | float):
        yield " does not say how far its parameters moved"
        return
    still = [name for name, change in moved.items() if not change > MOVED_SHARE * rate]
    if still:
        yield (
            f": {len(still)} of {len(moved)} groups of parameters did not move: "
            f"{', '.join(still)} (largest learning rate {rate:g})"
        )


def shadow_account(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """In the watched steps the optimizer did what config, schedule and gradient make of AdamW."""
    steps = _watched_problems(ranks, work) + _again_problems(ranks, work)
    return steps + _ranks_problems(ranks, work)


def gradient_tolerance(work: Workload) -> float:
    """What a step's gradient may be off by from the same without DDP, as a share of itself.

    Each rank's is rounded to the wire's type, and so is every sum: random errors, whose squares add
    up over the ranks. The order of sums may be another.
    """
    wire = _WIRE_ROUNDOFFS * ROUNDOFF.get(work.wire or "bf16", 0.0) * math.sqrt(work.nproc)
    return max(oracle_tolerance(work), wire)


@each_rank
def _again_problems(rank: RankLog, work: Workload) -> Iterator[str]:
    """The gradient that the optimizer got is that of the loss of this step's batches."""
    told: Mapping[str, Any] = rank.ending.get("recomputed") or {}
    if not told or rank.first_step is None or rank.steps is None or work.steps is None:
        yield ": no gradient was computed a second time"
        return
    first, last, profiled = rank.first_step, work.steps, work.profiled
    drawn = {t: recomputed_steps(t, first, last, profiled=profiled) for t in rank.tokens}
    yield from _other_steps("gradients were computed again", told, drawn, rank.steps["step"])
    gap, limit = told.get("gradient"), gradient_tolerance(work)
    if not within(gap, limit):
        yield (
            f": the gradient before clipping is not that of the step's loss: off by {gap} of "
            f"itself, allowed {limit:.2g}"
        )
        return  # of another gradient nobody needs to know how it is rounded
    yield from _bias_problems(told.get("bias") or {}, work)


def bias_tolerance(work: Workload, weight: float) -> float:
    """What the errors of gradients in a half type may be on average, as a share; 0 in any other.

    Cutting digits off makes 0.69 roundoffs of it. Rounding to nearest makes half a roundoff at one
    element, this way or that, so of the mean over `weight` elements six deviations are allowed.
    """
    return ROUNDOFF.get(work.wire or "", 0.0) * max(_BIAS, 3 / math.sqrt(weight))


def _bias_problems(told: Mapping[str, Any], work: Workload) -> Iterator[str]:
    """A half type on the wire rounds to nearest: up as often as down, and not towards 0."""
    if work.wire not in _ROUNDED_ON_THE_WIRE:
        return
    weight = told.get("weight")
    if not isinstance(weight, int | float) or not weight > 0:
        yield ": which way gradients are rounded was held against nothing"
        return
    limit = bias_tolerance(work, weight)
    for name, way in (("toward_zero", "towards 0 or away from it"), ("down", "up or down")):
        if not apart(told.get(name), 0.0) <= limit:
            yield (
                f": gradients are rounded {way}, not to nearest: by {told.get(name)} on average, "
                f"allowed {limit:.2g}"
            )


def _other_steps(
    what: str, told: Mapping[str, Any], drawn: Mapping[str, Iterable[int]], ended: Iterable[int]
) -> Iterator[str]:
    """Steps that were told and are not those that a token has drawn, of those that ended."""
    there = {int(step) for step in ended}
    # One token; that it is the launch's own is another row's to say.
    wanted = [[step for step in drawn[token] if step in there] for token in sorted(drawn)]
    if told.get("steps") not in wanted:
        right = " or ".join(map(str, wanted)) or "those that a token draws"
        yield f": {what} in steps {told.get('steps')}, not {right}"


def _ranks_problems(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """All ranks made the same gradient of a micro-batch that was the same for all.

    One that is wrong moves the mean too, so the rank furthest from it is named; of two, both.
    """
    told = {
        rank.rank: rank.ending["recomputed"].get("ranks")
        for rank in ranks
        if rank.ending.get("recomputed")
    }
    gaps = {n: gap for n, gap in told.items() if within(gap, math.inf)}
    problems = [
        f"rank {number}: its gradient of the micro-batch that all ranks had is off by {gap}"
        for number, gap in told.items()
        if number not in gaps
    ]
    largest, limit = max(gaps.values(), default=0.0), gradient_tolerance(work)
    if largest > limit:
        furthest = [str(n) for n, gap in gaps.items() if gap >= _AS_FAR * largest]
        problems.append(
            f"ranks make different gradients of one micro-batch: rank {' and rank '.join(furthest)}"
            f" off by {largest:.4g} of the ranks' mean, allowed {limit:.2g}"
        )
    return problems


@each_rank
def _watched_problems(rank: RankLog, work: Workload) -> Iterator[str]:
    told: Mapping[str, Any] = rank.ending.get("shadow") or {}
    if not told or rank.first_step is None or rank.steps is None:
        yield ": the optimizer's updates were held against nothing"
        return
    if work.steps is None:
        yield ": env.json does not say how many steps its launch has"
        return
    drawn = {t: watched_steps(t, rank.first_step, work.steps) for t in rank.tokens}
    yield from _other_steps("the optimizer was watched", told, drawn, rank.steps["step"])
    wrong = [name for name, (_, limit) in _ALLOWED.items() if not within(told.get(name), limit)]
    for name in wrong:
        what, limit = _ALLOWED[name]
        unit = " roundoffs of float32" if name in _ROUNDOFFS else " of itself"
        alone = _OF_WEIGHTS_ALONE if wrong == ["weight"] else ""
        # A moment takes the weights with it.
        if [one for one in wrong if one != "weight"] == [name] and name in _MOMENTS:
            alone = _OF_ONE_MOMENT.format_map(_MOMENTS[name])
        yield f": {what}: off by {told.get(name)}{unit}, allowed {limit:g}{alone}"
    if told.get("jumps") != 0:
        yield (
            ": weights, moments or the model's mode change between two steps, an evaluation has "
            "other weights than the last update left, or updates are not counted: "
            f"{told.get('jumps')} of those watched"
        )
