"""The same steps as several files and processes tell them: rows, heartbeats, evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nsa.contract.digests import drawn_batch, step_weight
from runbook.accounts import COPY_TOLERANCE, Workload, apart, due, each_rank
from runbook.accounts.clocks import joined
from runbook.accounts.model import from_host_tolerance
from runbook.records import RankExit
from runbook.records.evidence import RankLog

if TYPE_CHECKING:
    import pandas as pd

# Memory of a process as two readings of one step show it.
MEMORY_TOLERANCE_MIB = 16.0
# Of sums of the same float64 numbers in another order.
_SUM_TOLERANCE = 1e-9
# So many steps of two processes never all end in the same microsecond.
_SAME_STEPS = 5
# Columns that have a second source in every rank's heartbeats.
_COPIED = ("step", "loss", "toks_per_s", "grad_norm", "tokens", "dt_s")


def column_account(frame: pd.DataFrame) -> list[str]:
    """training.csv has every column that heartbeats tell too."""
    lacking = [name for name in _COPIED if name not in frame]
    return [f"the CSV has no column {', '.join(lacking)}"] if lacking else []


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
    return problems + _of_one_clock(ranks)


def _of_one_clock(ranks: Sequence[RankLog]) -> list[str]:
    """Ranks that end their steps in the same microseconds: one of them tells the other's times."""
    first: dict[tuple[float, ...], int] = {}
    problems = []
    for rank in ranks:
        if rank.steps is None or len(rank.steps) < _SAME_STEPS:
            continue
        ends = tuple(rank.steps["mono"].iloc[-_SAME_STEPS:])
        if first.setdefault(ends, rank.rank) != rank.rank:
            problems.append(
                f"ranks {first[ends]} and {rank.rank} end {_SAME_STEPS} steps in the same "
                "microseconds: one tells the times of the other"
            )
    return problems


def step_account(ranks: Sequence[RankLog]) -> list[str]:
    """Every rank ends every step once, and the ranks hold the same parameters at the end."""
    problems = []
    for rank in ranks:
        if rank.steps is None:
            continue
        steps = rank.steps["step"]
        again = sorted({int(step) for step in steps[steps.duplicated()]})
        if again:
            problems.append(f"rank {rank.rank} ends {len(again)} steps twice, first {again[0]}")
    hashes = {rank.param_hash for rank in ranks}
    if len(hashes) > 1:
        problems.append("parameters differ between ranks at the end")
    return problems


def copy_account(frame: pd.DataFrame, ranks: Sequence[RankLog]) -> list[str]:
    """training.csv and the heartbeats tell the same steps, losses, norms and, on rank 0, rates."""
    problems = []
    for rank in ranks:
        if rank.steps is None or rank.steps["loss"].isna().all():
            problems.append(f"rank {rank.rank} reports no progress to hold the CSV against")
            continue
        if set(rank.steps["step"]) != set(frame["step"]):
            problems.append(
                f"the CSV has {len(frame)} steps, rank {rank.rank} ended {len(rank.steps)}"
            )
        # Agreed by all ranks; each has a rate of its own, and rank 0 writes the CSV.
        agreed = ("loss", "grad_norm")
        own = tuple(name for name in ("toks_per_s", "fetch_s") if name in frame)
        both = joined(frame[["step", *agreed, *own]], rank.steps, *agreed, *own)
        for name in (*agreed, *own) if rank.rank == 0 else agreed:
            said = both[f"{name}_said"]
            allowed = COPY_TOLERANCE * said.abs() + 1e-3 * (name == "toks_per_s")
            # A NaN in the CSV is near nothing.
            off = said.notna() & ~((both[name] - said).abs() <= allowed)
            if off.any():
                row = both[off].iloc[0]
                problems.append(
                    f"{name} of step {row['step']:.0f} is {row[name]:.6g} in the CSV and "
                    f"{row[f'{name}_said']:.6g} in rank {rank.rank}'s heartbeats "
                    f"({int(off.sum())} steps differ)"
                )
    return problems


def summed_account(frame: pd.DataFrame, ranks: Sequence[RankLog]) -> list[str]:
    """Losses and norms of all steps in the CSV sum to what the ranks summed where they computed.

    Each step counts by its weight, so that two that change places show. Both add the same float64
    numbers, the CSV the mean over the ranks.
    """
    told = [rank.ending.get("summed") or {} for rank in ranks]
    if not any(told):
        return []  # an earlier run
    weights = step_weight(frame["step"])
    problems = [
        f"rank {rank.rank} does not sum what it computed"
        for rank, one in zip(ranks, told, strict=True)
        if not one
    ]
    for name in ("loss", "grad_norm"):
        own = [one.get(name) for one in told if one.get("steps") == len(frame)]
        # What is not finite in a step is another row's to say, and fp16 leaves such a step out.
        if len(own) < len(ranks) or not bool((frame[name].abs() < math.inf).all()):
            continue
        sums = [float(one) for one in own if isinstance(one, int | float)]
        wanted = sum(sums) / len(ranks) if len(sums) == len(ranks) else math.nan
        written, size = ((weights * part).sum() for part in (frame[name], frame[name].abs()))
        if not abs(written - wanted) <= _SUM_TOLERANCE * size:
            problems.append(
                f"{name} of {len(frame)} steps, each times its weight, sums to {written:.8g} in "
                f"the CSV and to {wanted:.8g} where the ranks computed it: a step tells another"
            )
    return problems


def written_account(exits: Sequence[RankExit]) -> list[str]:
    """Files that were behind their rank's heartbeats while the launcher looked."""
    return [
        f"{name} was up to {steps} steps behind what rank {end.rank} said of itself while it ran: "
        "its rows were not written as they came"
        for end in exits
        for name, steps in sorted(end.late_rows.items())
    ]


@each_rank
def memory_account(rank: RankLog, work: Workload) -> Iterator[str]:
    """On a CPU every step's memory is what the process has.

    On CUDA it is a peak: no less than what is in use, and no more than what the allocator held.
    """
    if rank.steps is None or "rss_mib" not in rank.steps:
        yield " does not say how much memory its steps end with"
        return
    # A profiler may write its trace between a step's reading and its end.
    steps = rank.steps[rank.steps["alone"].astype(bool)]
    wrong = (steps["mem_mib"] - steps["rss_mib"]).abs() > MEMORY_TOLERANCE_MIB
    if work.device == "cuda":
        wrong = steps["mem_mib"] < steps["cuda_mib"] - MEMORY_TOLERANCE_MIB
        if "reserved_mib" in steps:
            wrong |= steps["reserved_mib"] < steps["mem_mib"] - MEMORY_TOLERANCE_MIB
    if wrong.any():
        row = steps[wrong].iloc[-1]
        yield (
            f": memory of step {row['step']:.0f} is {row['mem_mib']:.0f} MiB, but its process has "
            f"{row['rss_mib']:.0f} and its device {row['cuda_mib']} MiB, of "
            f"{row.get('reserved_mib')} MiB reserved at most"
        )


def evaluation_account(
    val: pd.DataFrame | None, ranks: Sequence[RankLog], work: Workload
) -> list[str]:
    """Every evaluation is the mean of all planned batches, of which one was computed again.

    `val` is val.csv, which has to tell the same steps and losses as rank 0. On which rows an
    evaluation was made is for `data_account` to say.
    """
    problems = _batch_problems(ranks, work)
    if any(rank.evaluations for rank in ranks):
        problems += _mean_problems(ranks)
        problems += _table_problems(val, ranks)
    return problems


@each_rank
def _batch_problems(rank: RankLog, work: Workload) -> Iterator[str]:
    """Batches and tokens that are not the planned ones, or give another loss a second time."""
    tokens = work.eval_batches * work.pass_tokens
    for told in rank.evaluations:
        where = f"'s evaluation after step {told.get('step')}"
        losses, again = told.get("losses") or (), told.get("again") or {}
        if len(losses) != work.eval_batches:
            yield (
                f"{where} tells the losses of {len(losses)} batches, planned are "
                f"{work.eval_batches}"
            )
        if told.get("embedded") != tokens:
            yield f"{where} embedded {told.get('embedded')} tokens, not {tokens}"
        # One token; that it is the launch's own is another row's to say.
        drawn = {
            drawn_batch(t, rank.rank, told.get("step") or 0, work.eval_batches) for t in rank.tokens
        }
        batch, loss = again.get("batch"), again.get("loss")
        if batch not in drawn or not batch < len(losses):
            those = ", ".join(map(str, drawn))
            yield f"{where} computed batch {batch} a second time, drawn is {those}"
        elif not apart(losses[batch], loss) <= from_host_tolerance(work):
            first = f"{_shown(losses[batch])} for batch {batch}"
            yield f"{where} tells a loss of {first}, computed again {_shown(loss)}"


@each_rank
def evaluations_left_out(rank: RankLog, work: Workload) -> Iterator[str]:
    """Steps that lack their evaluation."""
    asked = due(rank, work.eval_every)
    if missing := sorted(asked - {told.get("step") for told in rank.evaluations}):
        yield (
            f" left out {len(missing)} of {len(asked)} evaluations that train.eval_every="
            f"{work.eval_every} asks for, first after step {missing[0]}"
        )


def _mean_problems(ranks: Sequence[RankLog]) -> Iterator[str]:
    """Losses that are not the mean over ranks and batches."""
    steps = [[told.get("step") for told in rank.evaluations] for rank in ranks]
    if any(own != steps[0] for own in steps):
        yield "the ranks tell evaluations after different steps"
        return
    for together in zip(*(rank.evaluations for rank in ranks), strict=True):
        every = [loss for told in together for loss in told.get("losses") or ()]
        mean = sum(every) / len(every) if every else math.nan
        for rank, told in zip(ranks, together, strict=True):
            if not apart(told.get("loss"), mean) <= COPY_TOLERANCE * abs(mean):
                yield (
                    f"rank {rank.rank} tells a validation loss of {_shown(told.get('loss'))} after "
                    f"step {told.get('step')}, the mean of {len(every)} batches is {_shown(mean)}"
                )


def _table_problems(val: pd.DataFrame | None, ranks: Sequence[RankLog]) -> Iterator[str]:
    """What val.csv says otherwise than rank 0, which writes it."""
    read = val[["step", "loss"]] if val is not None and "loss" in val else None
    rows = [] if read is None else list(read.itertuples(index=False, name=None))
    told = [(one.get("step"), one.get("loss")) for one in ranks[0].evaluations]
    if [step for step, _ in rows] != [step for step, _ in told]:
        yield f"val.csv has {len(rows)} evaluations, rank {ranks[0].rank} tells of {len(told)}"
        return
    for (step, loss), (_, said) in zip(rows, told, strict=True):
        if not apart(loss, said) <= COPY_TOLERANCE * abs(loss):
            place = f"after step {step:.0f}, the heartbeats {_shown(said)}"
            yield f"val.csv has a loss of {_shown(loss)} {place}"


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)
