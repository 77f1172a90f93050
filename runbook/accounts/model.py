"""What the model computes: against the equations, and against itself when it computes it again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from runbook.accounts import Workload, apart, computed_twice, each_rank, within
from runbook.accounts.first_weights import NO_SHAPE, begins, parameters
from runbook.folder.launch.shapes import is_count
from runbook.records.evidence import Frame, RankLog

# Unit roundoff of what the products are computed in, and how often it may add up in one layer. On
# CUDA fp32 products run in TF32, which has the bits of fp16.
ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
ROUNDOFFS = 8
# What is off by less than this share of a roundoff was computed in a wider type.
NARROW = 1 / 8
# Gradients come through twice as many roundings, and those of scores are differences of what is
# nearly equal. Of 750 healthy layers, some with weights four times as large as at first, the worst
# was off by 3.3 times what an output may be in bf16, by 0.6 times in fp32.
SLOPES = 8
# Accumulated in float32, sums of some thousand products: 7e-7 for the smallest model.
FLOAT32_SUMS = 2e-5
# The same weights on the same tokens, by the same kernels in another order of sums: nats.
AGAIN_TOLERANCE = 2e-4
# The same logits, summed in another order: nats.
LOSS_TOLERANCE = 2e-3
# Means of the same gates by two formulas in float64; a device may round the pass otherwise.
GATES_TOLERANCE = 1e-4
# Means of whole numbers by two formulas in float64, as a share.
_WHOLE_NUMBERS = 1e-6
# The initial block, the current one and the one before it are chosen whatever their scores.
_FORCED = 3
# How a number of the selection is told, by its column.
_SELECTED = {
    "sel_blocks_mean": "a query attends to {} blocks",
    "sel_forced_share": "{} of its blocks are forced",
}
# So many numbers are told of a layer; of which a column is, and what it makes of the layers.
_TOLD = 5
_OVER_LAYERS: Mapping[str, tuple[int, Callable[[Sequence[float]], float]]] = {
    "entropy": (0, min),
    "max_gate": (1, max),
    "entropy_mean": (0, fmean),
    "max_gate_mean": (1, fmean),
    "share_cmp": (2, fmean),
    "share_sel": (3, fmean),
    "share_win": (4, fmean),
}


# What is no name of a part by itself.
_CALLED = {"slope": "a layer's gradient"}


def oracle_account(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """What each rank computed for its first and its last batch, against the equations in float64.

    The last one in fp32 only: trained weights make scores so large that what half types round
    off has no bound.
    """
    if not ranks:
        return ["no rank held a batch against the oracle"]
    # Nor has it one in the first batch of a launch that goes on from a checkpoint.
    begun = work.dtype == "fp32" or begins(ranks)
    found = _spot_problems(ranks, "first", work, bounded=begun)
    if work.dtype == "fp32":
        found += _spot_problems(ranks, "last", work, bounded=begun)
    return found + _layers_off(ranks, work)


@each_rank
def _layers_off(rank: RankLog, work: Workload) -> Iterator[str]:
    """The steps that are computed twice: one drawn layer and the head are held against the
    equations, and what lies between modules.

    Half types tell of the latter alone, and earlier runs did not tell all.
    """
    again, allowed = rank.ending.get("recomputed") or {}, oracle_tolerance(work)
    seams: Mapping[str, Any] = again.get("seams") or {}
    if broken := [(step, count) for step, count in seams.items() if count != 0]:
        step, count = broken[0]
        yield (
            f": {count} modules get what the one before did not give in step {step} "
            f"({len(broken)} of {len(seams)} steps looked at)"
        )
    for name, what, limit in (
        ("layers", "a layer", allowed),
        ("logits", "logits", allowed),
        ("slopes", _CALLED["slope"], SLOPES * allowed),
    ):
        told: Mapping[str, Any] = again.get(name) or {}
        off = [(step, error) for step, error in told.items() if not within(error, limit)]
        if off:
            step, error = off[0]
            yield (
                f": {what} is off by {error} of itself in step {step}, allowed {limit:.2g} "
                f"({len(off)} of {len(told)} steps looked at)"
            )


@each_rank
def _spot_problems(rank: RankLog, when: str, work: Workload, *, bounded: bool) -> Iterator[str]:
    proof = rank.proof if when == "first" else rank.ending.get("proof")
    spots: Mapping[str, Any] = (proof or {}).get("oracle") or {}
    if not spots:
        yield f" did not hold its {when} batch against the oracle"
        return
    allowed = oracle_tolerance(work)
    limits = {"embedding": 0.0}
    if bounded:
        limits |= dict.fromkeys(("attention", "gates", "layer", "logits"), allowed)
        # Earlier runs told no slope.
        limits |= {"slope": SLOPES * allowed} if "slope" in spots else {}
        limits["blocks_shortfall"] = allowed
    for what, limit in limits.items():
        if not within(spots.get(what), limit):
            yield (
                f": {_CALLED.get(what, what)} is off by {spots.get(what)} of itself in the {when} "
                f"batch, allowed {limit:.2g}"
            )
    least = NARROW * ROUNDOFF.get(work.dtype, 0.0)
    attention = spots.get("attention")
    if work.dtype != "fp32" and isinstance(attention, int | float) and attention < least:
        yield f": attention is off by {attention} only: not computed in {work.dtype}"
    if work.layers is not None and spots.get("layers") != work.layers:
        yield f": {spots.get('layers')} layers ran, the config has {work.layers}"
    told = spots.get("shape") or {}
    other = [n for n, value in work.shape.items() if told.get(n) != value]
    if other:
        has, wanted = (
            ", ".join(f"{name}={values.get(name)}" for name in other)
            for values in (told, work.shape)
        )
        yield f": the model has {has}, the config {wanted} ({when} batch)"
    if spots.get("seams") != 0:
        yield f": {spots.get('seams')} modules get what the one before did not give"
    if spots.get("blocks_illegal") != 0:
        yield f": {spots.get('blocks_illegal')} choices of blocks break the rules"


def oracle_tolerance(work: Workload) -> float:
    """Error of one layer, as a share of its output, that the launch's types explain."""
    tf32 = work.device == "cuda" and work.dtype == "fp32"
    roundoff = ROUNDOFF.get("fp16" if tf32 else work.dtype, 0.0)
    return max(FLOAT32_SUMS, ROUNDOFFS * roundoff)


def from_host_tolerance(work: Workload) -> float:
    """How far a loss may be from that of a pass that the host launches, in nats.

    On a GPU the pass that is held against it may be replayed or compiled.
    """
    return AGAIN_TOLERANCE if work.device == "cpu" else LOSS_TOLERANCE


@each_rank
def loss_account(frame: Frame, rank: RankLog) -> Iterator[str]:
    """The loss of steps run twice."""
    twice = rank.ending.get("recomputed") or {}
    if not twice.get("steps") or len(twice["steps"]) != len(twice.get("losses") or ()):
        yield " computed no step's loss a second time"
        return
    pairs = computed_twice(frame, "loss", twice, "losses")
    if off := [one for one in pairs if not apart(*one[1:]) <= AGAIN_TOLERANCE]:
        step, told, found = off[0]
        yield (
            f" computed the loss of step {step} again, {found:.5f}; the CSV has {told:.5f} "
            f"({len(off)} of {len(pairs)} steps differ)"
        )


def first_loss_account(frame: Frame, ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """The loss of the first step is that of the batch that was proven: the mean over the ranks.

    Where a step has several micro-batches, the proof knows only the first.
    """
    if work.step_tokens != work.pass_tokens or len(ranks) != work.nproc or not len(frame):
        return []
    proven = [(rank.proof or {}).get("loss") for rank in ranks]
    known = [float(loss) for loss in proven if isinstance(loss, int | float)]
    if len(known) < len(ranks):
        return ["a rank's proof does not say the loss of its first batch"]
    step, loss = int(frame["step"].iloc[0]), float(frame["loss"].iloc[0])
    mean = sum(known) / len(known)
    if abs(loss - mean) <= from_host_tolerance(work):
        return []
    return [
        f"the CSV's loss of step {step} is {loss:.5f}, the ranks' proof of its batch came to "
        f"{mean:.5f}"
    ]


def gates_account(gates: Frame | None, ranks: Sequence[RankLog], work: Workload) -> Iterator[str]:
    """Readings of rank 0 are those of its steps when they are computed a second time."""
    if gates is None or gates.empty:
        return
    again = next((r.ending.get("recomputed") or {} for r in ranks if r.rank == 0), {})
    steps, layers = again.get("steps") or (), again.get("gates") or ()
    if not steps or len(steps) != len(layers):
        yield "the gates of no step were computed a second time"
        return
    by_step = dict(zip(steps, layers, strict=True))
    both = gates[gates["step"].isin(by_step)]
    if both.empty:
        yield "no reading of the gates is of a step that was computed a second time"
    for row in both.to_dict("records"):
        found = by_step[int(row["step"])]
        if work.layers not in (None, len(found)) or any(len(o) != _TOLD for o in found):
            yield f"step {row['step']:.0f} tells the gates of {len(found)} layers"
            continue
        for name, (place, over) in _OVER_LAYERS.items():
            wanted, read = over([layer[place] for layer in found]), row.get(name, math.nan)
            # Shares are empty where auxiliary statistics are switched off.
            empty = name.startswith("share_") and math.isnan(read)
            if not empty and not abs(read - wanted) <= GATES_TOLERANCE:
                yield (
                    f"{name} of the gates in step {row['step']:.0f} is {read:.5f} in gates.csv, "
                    f"computed again {wanted:.5f}"
                )


def selection_account(gates: Frame | None, work: Workload) -> list[str]:
    """The selection that gates.csv tells of is that of the config's shape."""
    other = other_selection(gates, work.shape, work.seq_len)
    return [other] if other else []


def other_selection(gates: Frame | None, shape: Mapping[str, Any], seq_len: Any) -> str:
    """How a reading of the selection is not that of this shape, or an empty string.

    A query in block b attends to min(n_sel, b + 1) of them, of which min(3, b + 1) are forced: no
    training changes those means.
    """
    l_sel: Any = shape.get("l_sel")
    n_sel: Any = shape.get("n_sel")
    known = all(is_count(one) and one > 0 for one in (l_sel, n_sel, seq_len))
    if gates is None or not known:
        return ""  # another trainer's config
    read, forced = (_mean_blocks(most, seq_len, l_sel) for most in (n_sel, _FORCED))
    for (column, words), meant in zip(_SELECTED.items(), (read, forced / read), strict=True):
        if column not in gates:
            continue  # an earlier run
        # Empty where auxiliary statistics are switched off.
        readings = gates.dropna(subset=[column])
        other = readings[(readings[column] - meant).abs() > _WHOLE_NUMBERS * meant]
        if not other.empty:
            step, seen = int(other["step"].iloc[0]), float(other[column].iloc[0])
            return (
                f"from step {step} {words.format(f'{seen:.4g}')}, where n_sel={n_sel}, "
                f"l_sel={l_sel} and S={seq_len} mean {meant:.4g}"
            )
    return ""


def flops_account(env: Mapping[str, Any], work: Workload) -> list[str]:
    """The FLOPs per token that env.json tells, of which MFU is made, are those of its model."""
    told = (env.get("effective") or {}).get("model_flops_per_token")
    try:
        wanted = 6.0 * (parameters(env) + _attended(work))
    except NO_SHAPE:
        return []  # said by `size_account`
    if told is None or apart(told, wanted) <= _WHOLE_NUMBERS * wanted:
        return []
    return [f"env.json tells {told} FLOPs per token; this model needs {wanted:.5g}"]


def _attended(work: Workload) -> float:
    """Numbers of keys and values that a token's queries meet, of all heads and layers.

    A query of block b meets min(n_sel, b + 1) blocks but for what of its own comes later; a
    compressed key is met by the queries from its last token on.
    """
    names = ("l", "d", "l_sel", "n_sel", "w", "n_layers", "n_heads", "d_k", "d_v")
    size, stride, block, chosen, window, layers, heads, d_k, d_v = (
        int(work.shape[name]) for name in names
    )
    length = work.seq_len
    compressed = sum(range(max(0, length - size + 1), 0, -stride))
    later = sum(block - 1 - query % block for query in range(length))
    selected = block * _mean_blocks(chosen, length, block) * length - later
    near = sum(min(window, query + 1) for query in range(length))
    return layers * heads * (d_k + d_v) * (compressed + selected + near) / length


def _mean_blocks(most: int, seq_len: int, size: int) -> float:
    """The mean of min(`most`, t // size + 1) over the queries t of a sequence."""
    blocks, rest = divmod(seq_len, size)
    growing = min(most, blocks)
    whole = growing * (growing + 1) // 2 + (blocks - growing) * most
    return (size * whole + rest * min(most, blocks + 1)) / seq_len
