"""Accounts that must balance: facts of one launch that two sources tell, held against each other.

What the trainer says about itself is believed only where something else in the same folder says
so too. Every function returns what does not balance, in words; a source that is missing does not
balance either. Judging a run and inspecting a directory use the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runbook.records.evidence import RankLog

if TYPE_CHECKING:
    import pandas as pd

# Clocks agree within this share, and within what one pause of the machine may take.
CLOCK_TOLERANCE = 0.02
PAUSE_S = 0.1
# Between the end of a step and its heartbeat, in the middle of all steps.
JITTER_S = 5e-5
# Of so many steps a quarter has to be timed by both; a shorter launch is for no rate.
_MANY = 40
# Starting and ending a launch, outside its ranks' clocks.
OVERHEAD_S = 60.0
# Numbers of the same step in two files: only their rounding may differ.
COPY_TOLERANCE = 1e-6
# What a mean of known numbers may be off by after it traveled in a type.
WIRE_TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
# Unit roundoff of what the products are computed in, and how often it may add up in one layer. On
# CUDA fp32 products run in TF32, which has the bits of fp16.
ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
ROUNDOFFS = 8
# Accumulated in float32, sums of some thousand products: 7e-7 for the smallest model.
FLOAT32_SUMS = 2e-5
# Adam moves a parameter by about the learning rate in every step, whatever its gradient.
MOVED_SHARE = 0.1
_COMPRESSED = ("attention.k_cmp", "attention.v_cmp", "compress")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What env.json says that one launch trains: tokens of a rank in a step, in a pass."""

    nproc: int
    step_tokens: int
    pass_tokens: int
    seq_len: int
    block: int
    wire: str | None
    generated: bool
    dtype: str
    device: str
    layers: int | None = None
    grad_clip: float | None = None

    @classmethod
    def of(cls, env: Mapping[str, Any]) -> Workload:
        """From env.json. Raises `ValueError` or `TypeError` where it lacks what is needed."""
        effective, config = env["effective"], env.get("config") or {}
        nproc = int(env["world_size"])
        per_pass = int(effective["per_rank_batch"]) * int(effective["seq_len"])
        return cls(
            nproc=nproc,
            step_tokens=per_pass * int(effective["accumulation"]),
            pass_tokens=per_pass,
            seq_len=int(effective["seq_len"]),
            block=int((config.get("nsa") or {}).get("l") or 0),
            wire=_wire(env, nproc),
            generated=effective.get("dataset") in ("synthetic", "markov"),
            dtype=str(effective["dtype"]),
            device=str(effective.get("device")),
            layers=(config.get("model") or {}).get("n_layers"),
            grad_clip=(config.get("train") or {}).get("grad_clip"),
        )


def _wire(env: Mapping[str, Any], nproc: int) -> str | None:
    """The type that gradients should travel in; None where the arms differ in it."""
    if nproc == 1:
        return "fp32"
    if "NSA_DDP_COMPRESS" in str(env.get("arms") or ""):
        return None
    toggles = {row.get("name"): row.get("value") for row in env.get("toggles") or ()}
    kind = str(toggles.get("NSA_DDP_COMPRESS") or "off")
    return "fp32" if kind == "off" else kind


def time_account(
    frame: pd.DataFrame, ranks: Sequence[RankLog], duration_s: float | None
) -> list[str]:
    """Column dt_s, the ranks' monotonic clocks and the launcher's clock tell the same time."""
    problems = []
    for rank in ranks:
        if rank.steps is None:
            problems.append(f"rank {rank.rank}: no step_end to time the steps by")
            continue
        problems += _step_clock(frame, rank, _beside_others(rank, ranks))
        span = rank.clock_s
        if duration_s and span is not None:
            outside = duration_s - span
            if span > duration_s * (1 + CLOCK_TOLERANCE) + PAUSE_S:
                problems.append(
                    f"rank {rank.rank} counts {span:.1f} s in a launch of {duration_s:.1f} s"
                )
            elif outside > OVERHEAD_S + CLOCK_TOLERANCE * duration_s:
                problems.append(
                    f"rank {rank.rank} counts {span:.1f} s of a launch of {duration_s:.1f} s"
                )
    return problems


def _beside_others(rank: RankLog, ranks: Sequence[RankLog]) -> set[int]:
    """Steps in which this rank may have waited for something else that another one did.

    What another rank does at the end of a step this one spends waiting in the next.
    """
    steps: set[int] = set()
    for other in ranks:
        if other.rank != rank.rank and other.steps is not None:
            busy = other.steps["step"][~other.steps["alone"].astype(bool)]
            steps |= {*busy, *(busy + 1)}
    return steps


def _step_clock(frame: pd.DataFrame, rank: RankLog, left_out: Collection[int] = ()) -> list[str]:
    both = clocked_steps(frame, rank)
    if both is not None:
        both = both[~both["step"].isin(left_out)]
    if both is None or len(both) < (len(frame) // 4 if len(frame) >= _MANY else 1):
        return [f"rank {rank.rank}: too few steps have a time in both files"]
    apart, clock = both["clock_s"] - both["dt_s"], both["clock_s"]
    total, typical = float(clock.sum()), float(clock.median())
    allowed = CLOCK_TOLERANCE * typical + JITTER_S + _median_error(apart)
    off = abs(float(apart.median())) > allowed
    if off or abs(float(apart.sum())) > CLOCK_TOLERANCE * total + PAUSE_S:
        share = float(both["dt_s"].sum()) / total if total else math.nan
        return [
            f"dt_s sums to {share:.3f} of what rank {rank.rank}'s clock shows for the same "
            f"{len(both)} steps"
        ]
    return []


def _median_error(apart: pd.Series[float]) -> float:
    """Three standard errors of the median, from the middle half: a few steps on a busy machine."""
    spread = 1.4826 * float((apart - apart.median()).abs().median())
    return 3 * 1.2533 * spread / math.sqrt(len(apart))


def clocked_steps(frame: pd.DataFrame, rank: RankLog) -> pd.DataFrame | None:
    """Steps with their dt_s and the clock_s between step_end and the one before, both in s.

    Left out are the first step of an arm's block and steps in whose time something else happened.
    """
    import pandas as pd

    if rank.steps is None or "dt_s" not in frame:
        return None
    clock = rank.steps.assign(clock_s=rank.steps["mono"].diff())
    inside = pd.Series(True, index=frame.index)
    for name in ("block", "arm"):  # all arms of a round have its number
        if name in frame:
            inside &= frame[name].eq(frame[name].shift())
    both = frame[["step", "dt_s"]].assign(inside=inside)
    both = both.merge(clock[["step", "clock_s", "alone"]], on="step")
    kept: pd.DataFrame = both[both["inside"] & both["alone"].astype(bool) & both["clock_s"].notna()]
    return kept


def token_account(frame: pd.DataFrame, ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """Tokens that entered the embedding and positions that got a gradient, on every rank."""
    problems = []
    for rank in ranks:
        who = f"rank {rank.rank}"
        if rank.steps is None or rank.steps["embedded"].isna().any():
            problems.append(f"{who} does not say how many tokens it embedded")
            continue
        wrong = rank.steps[rank.steps["embedded"] != work.step_tokens]
        if len(wrong):
            step, seen = wrong["step"].iloc[0], wrong["embedded"].iloc[0]
            problems.append(
                f"{who} embedded {seen:.0f} tokens in step {step:.0f}, not {work.step_tokens}"
            )
        positions = (rank.proof or {}).get("positions")
        if positions != work.pass_tokens:
            problems.append(
                f"{who} takes the loss at {positions} positions of {work.pass_tokens} in a pass"
            )
        sums = [rank.ending.get(name) for name in ("fetched_sum", "embedded_sum")]
        if sums[0] is None or sums[0] != sums[1]:
            problems.append(f"{who} embeds other tokens than it fetched: {sums[1]} for {sums[0]}")
    if "tokens" in frame and (frame["tokens"] != work.step_tokens * work.nproc).any():
        problems.append("column tokens is not what the ranks embed together")
    return problems


def data_account(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """Every rank reads its own data, and no step reads what another step did."""
    problems: list[str] = []
    digests: dict[int, pd.Series[Any]] = {}
    for rank in ranks:
        if rank.steps is None or rank.steps["data"].isna().any():
            problems.append(f"rank {rank.rank} does not say which data it read")
            continue
        own = rank.steps.set_index("step")["data"].astype(str)
        again = own[own.duplicated()] if work.generated else own[own.eq(own.shift())]
        if len(again):
            problems.append(f"rank {rank.rank} reads in step {again.index[0]} what it read before")
        for other, theirs in digests.items():
            same = own.index[own.eq(theirs.reindex(own.index))]
            if len(same):
                problems.append(
                    f"ranks {other} and {rank.rank} read the same data in {len(same)} steps, "
                    f"first in step {same[0]}"
                )
        digests[rank.rank] = own
    return problems


def union_of_data(ranks: Sequence[RankLog]) -> pd.Series[Any] | None:
    """For each step the sum of the ranks' digests: equal for one rank that reads everything."""
    total = None
    for rank in ranks:
        if rank.steps is None or rank.steps["data"].isna().any():
            return None
        own = rank.steps.set_index("step")["data"].map(lambda text: int(str(text), 16))
        total = own if total is None else total + own
    return None if total is None else total.map(lambda number: number % (1 << 64))


def copy_account(frame: pd.DataFrame, ranks: Sequence[RankLog]) -> list[str]:
    """training.csv and the heartbeats tell the same loss and steps, and rank 0's the same rate."""
    problems = []
    for rank in ranks:
        if rank.steps is None or rank.steps["loss"].isna().all():
            problems.append(f"rank {rank.rank} reports no progress to hold the CSV against")
            continue
        if set(rank.steps["step"]) != set(frame["step"]):
            problems.append(
                f"the CSV has {len(frame)} steps, rank {rank.rank} ended {len(rank.steps)}"
            )
        both = frame.merge(rank.steps, on="step", suffixes=("", "_said"))
        # The loss is agreed by all ranks; the rate is each rank's own, and rank 0 writes the CSV.
        agreed = ("loss", "grad_norm")
        for name in (*agreed, "toks_per_s") if rank.rank == 0 else agreed:
            if name not in both or f"{name}_said" not in both:
                problems.append(f"{name} is not in both the CSV and rank {rank.rank}'s heartbeats")
                continue
            said = both[f"{name}_said"]
            apart = (both[name] - said).abs() > COPY_TOLERANCE * said.abs() + 1e-3 * (
                name == "toks_per_s"
            )
            if apart.any():
                row = both[apart].iloc[0]
                problems.append(
                    f"{name} of step {row['step']:.0f} is {row[name]:.6g} in the CSV and "
                    f"{row[f'{name}_said']:.6g} in rank {rank.rank}'s heartbeats "
                    f"({int(apart.sum())} steps differ)"
                )
    return problems


def process_account(ranks: Sequence[RankLog]) -> list[str]:
    """One process for each rank, and one rank for each process."""
    writers: dict[int, int] = {}
    problems = []
    for rank in ranks:
        if not rank.pids:
            problems.append(f"rank {rank.rank} names no process")
        for pid in rank.pids:
            if writers.setdefault(pid, rank.rank) != rank.rank:
                problems.append(f"ranks {writers[pid]} and {rank.rank} are one process, {pid}")
    return problems


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
    if proof.get("missing"):
        problems.append(f"{who}: no gradient for {', '.join(map(str, proof['missing']))}")
    if not (_near(low, allowed) and _near(high, allowed)):
        problems.append(f"{who}: the mean of known gradients came out as {low} to {high} of itself")
    if work.wire is not None and wire != work.wire:
        problems.append(f"{who}: gradients travel as {wire}, not as {work.wire}")
    own: Mapping[str, float] = proof.get("own_gradient") or {}
    idle = [name for name, size in own.items() if size == 0 and not _may_idle(name, work)]
    if idle or not own:
        problems.append(f"{who}: no gradient reaches {', '.join(idle) or 'anything'}")
    return problems


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
        still = [name for name, change in moved.items() if not change > MOVED_SHARE * rate]
        if still:
            problems.append(
                f"rank {rank.rank}: {len(still)} of {len(moved)} groups of parameters did not "
                f"move: {', '.join(still)} (largest learning rate {rate:g})"
            )
    return problems


def oracle_account(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """What rank 0 computed for its first and its last batch, against the equations in float64.

    The last one in fp32 only: trained weights make scores so large that what half types round
    off has no bound.
    """
    first = next((rank for rank in ranks if rank.rank == 0), None)
    proofs = [("first", first.proof if first else None)]
    if work.dtype == "fp32" and first is not None:
        proofs.append(("last", first.ending.get("proof")))
    return [text for when, proof in proofs for text in _spot_problems(when, proof, work)]


def _spot_problems(when: str, proof: Mapping[str, Any] | None, work: Workload) -> list[str]:
    spots: Mapping[str, Any] = (proof or {}).get("oracle") or {}
    if not spots:
        return [f"rank 0 did not hold its {when} batch against the oracle"]
    allowed = oracle_tolerance(work)
    problems = [
        f"{what} is off by {spots.get(what)} of itself in the {when} batch, allowed {limit:.2g}"
        for what, limit in {
            "embedding": 0.0,
            "attention": allowed,
            "layer": allowed,
            "logits": allowed,
            "blocks_shortfall": allowed,
        }.items()
        if not _at_most(spots.get(what), limit)
    ]
    if work.layers is not None and spots.get("layers") != work.layers:
        problems.append(f"{spots.get('layers')} layers ran, the config has {work.layers}")
    if spots.get("seams") != 0:
        problems.append(f"{spots.get('seams')} modules get what the one before did not give")
    if spots.get("blocks_illegal") != 0:
        problems.append(f"{spots.get('blocks_illegal')} choices of blocks break the rules")
    return problems


def oracle_tolerance(work: Workload) -> float:
    """Error of one layer, as a share of its output, that the launch's types explain."""
    tf32 = work.device == "cuda" and work.dtype == "fp32"
    roundoff = ROUNDOFF.get("fp16" if tf32 else work.dtype, 0.0)
    return max(FLOAT32_SUMS, ROUNDOFFS * roundoff)


def _at_most(value: object, limit: float) -> bool:
    return isinstance(value, int | float) and value <= limit


def _may_idle(group: str, work: Workload) -> bool:
    """A sequence with fewer than two compressed blocks has nothing to choose among."""
    return work.seq_len < 2 * work.block and group.startswith(_COMPRESSED)


def _near(value: object, allowed: float) -> bool:
    return isinstance(value, int | float) and abs(value - 1.0) <= allowed
