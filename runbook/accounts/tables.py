"""What several files and processes tell of the same: rows, heartbeats, evaluations, checkpoints.

And of what a launch was given: the ranks run with its settings, and keep its checkpoints. That
env.json tells the settings of the plan is another row's to say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from nsa.contract import THREAD_VARIABLES, TIMEOUT_TOLERANCE_S, Event, checkpoint_step
from nsa.contract.digests import drawn_batch, step_weight
from nsa.toggles import TOGGLES, Value
from runbook.accounts import COPY_TOLERANCE, Keeping, Workload, apart, due, each_rank
from runbook.accounts.clocks import joined
from runbook.accounts.model import from_host_tolerance
from runbook.errors import listed
from runbook.folder.launch.documents import recorded_toggles
from runbook.folder.launch.shapes import is_number
from runbook.records import RankExit
from runbook.records.evidence import Frame, RankLog

# Memory of a process as two readings of one step show it.
MEMORY_TOLERANCE_MIB = 16.0
# Of sums of the same float64 numbers in another order.
_SUM_TOLERANCE = 1e-9
# Columns that have a second source in every rank's heartbeats.
_COPIED = ("step", "loss", "toks_per_s", "grad_norm", "tokens", "dt_s")
_TIMEOUT = "NSA_PG_TIMEOUT_MIN"
_PLAIN = re.compile(r"[1-9][0-9]{0,5}")
# A long run saves hundreds of times.
_NAMED = 8


def column_account(frame: Frame) -> list[str]:
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
        silent = "not every rank gives the digest of its parameters at the end"
        differ = "parameters differ between ranks at the end"
        problems.append(silent if None in hashes else differ)
    return problems


def copy_account(frame: Frame, ranks: Sequence[RankLog]) -> list[str]:
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


def summed_account(frame: Frame, ranks: Sequence[RankLog]) -> list[str]:
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


def evaluation_account(val: Frame | None, ranks: Sequence[RankLog], work: Workload) -> list[str]:
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


def _table_problems(val: Frame | None, ranks: Sequence[RankLog]) -> Iterator[str]:
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


def timeout_account(ranks: Sequence[RankLog], env: Mapping[str, Any]) -> list[str]:
    """The process group of every rank gives up when it was told to."""
    asked: Value = recorded_toggles(env).get(_TIMEOUT, TOGGLES[_TIMEOUT].default)
    if not isinstance(asked, int | float) or not is_number(asked):
        return [f"env.json does not say which {_TIMEOUT} is in force"]
    return _timeout_problems(ranks, asked, alone=len(ranks) < 2)


@each_rank
def _timeout_problems(rank: RankLog, asked: float, *, alone: bool) -> Iterator[str]:
    found = _told(rank).get("timeout_s")
    if found is None and not alone:
        yield " does not tell the timeout of its process group"
    elif found is not None and not abs(found - 60 * asked) <= TIMEOUT_TOLERANCE_S:
        yield (
            f": the process group waits for {found:g} s, {_TIMEOUT}={asked:g} asks for "
            f"{60 * asked:g} s"
        )


@each_rank
def thread_account(rank: RankLog, given: Mapping[str, str]) -> Iterator[str]:
    """Every rank computes with the threads of OMP_NUM_THREADS: of the plan, else as it found it."""
    told = _told(rank)
    found = told.get("variables") or {}
    omp, mkl = (str(given.get(name) or found.get(name) or "") for name in THREAD_VARIABLES)
    threads = told.get("threads")
    if threads is None:
        yield " does not tell with how many threads it computes"
        return
    if not _PLAIN.fullmatch(omp) or (mkl or omp) != omp:
        return  # no plain number, or another library's: torch decides
    cpus = told.get("cpus")
    # MKL takes one for each core at most, which has one CPU or two that share it.
    one_a_core = cpus is not None and threads < int(omp) and cpus <= 2 * threads
    if threads != int(omp) and not one_a_core:
        yield f" computes with {threads} threads, {THREAD_VARIABLES[0]}={omp}"


def _told(rank: RankLog) -> Mapping[str, Any]:
    """What the rank says at its end that it runs with."""
    return rank.ending.get("in_force") or {}


def saved_account(ranks: Sequence[RankLog], keeping: Keeping) -> list[str]:
    """Rank 0 has read some tensors of each checkpoint back, and those that were to go went.

    Where one was not written at all, `checkpoints_left_out` says so.
    """
    if not ranks or not ranks[0].checkpoints or checkpoints_left_out(ranks, keeping):
        return []
    newest = PurePath(str(ranks[0].checkpoints[-1].get("path"))).name
    told: Mapping[str, Any] = ranks[0].ending.get("saved") or {}
    if not told.get("elements"):
        return [f"nothing of the checkpoint {newest} was read back"]
    if why := told.get("unreadable"):
        return [
            f"checkpoints of the steps {_listed(told.get('wrong'))}: not to be read back: {why}"
        ]
    if told.get("step") != checkpoint_step(newest):
        return [f"step {told.get('step')} was read back, the newest checkpoint is {newest}"]
    if told.get("other") != 0:
        return [
            f"{newest}: {told.get('other')} of {told['elements']} elements read back are not what "
            f"the run held when the save began ({', '.join(map(str, told.get('tensors') or ()))})"
        ]
    problems = _other_ones_kept(ranks[0], told.get("kept"), keeping)
    # Each was read back as the next save began.
    read, wrong = told.get("read"), told.get("wrong")
    written = ranks[0].counts.get(Event.CHECKPOINT, len(ranks[0].checkpoints))
    if read != written:
        return [f"{read} of the {written} checkpoints that were written were read back", *problems]
    if wrong:
        text = "did not hold what the run held when their saves began"
        return [f"checkpoints of the steps {_listed(wrong)} {text}", *problems]
    return problems


def position_account(ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """Every rank goes on behind the last micro-batch of the step that was saved.

    Of generated data, whose position is the number of micro-batches; what place in documents is
    the right one nobody else knows.
    """
    if work.data is None:
        return []
    told: Mapping[str, Any] = (ranks[0].ending.get("saved") if ranks else None) or {}
    if not told or told.get("unreadable"):  # `saved_account` says why
        return []
    step, found = told.get("step"), told.get("positions")
    if not isinstance(found, list) or len(found) != len(ranks) or not isinstance(step, int):
        return ["the checkpoint does not tell where each rank goes on in its data"]
    wanted = {"step": step * work.data.accumulation}
    return [
        f"rank {rank} goes on from step {step} at {place} in its data, behind that step is {wanted}"
        for rank, place in enumerate(found)
        if place != wanted
    ]


def _written(rank: RankLog) -> list[int]:
    """The steps whose checkpoints the rank says it has written."""
    names = [PurePath(str(one.get("path"))).name for one in rank.checkpoints]
    return [step for step in map(checkpoint_step, names) if step is not None]


def checkpoints_left_out(ranks: Sequence[RankLog], keeping: Keeping) -> list[str]:
    """Steps that lack their checkpoint, as far as rank 0 tells."""
    if not ranks:
        return []
    written = _written(ranks[0])
    if missing := sorted(due(ranks[0], keeping.saves) - set(written)):
        others = f"those of {_listed(sorted(written))} were" if written else "none was"
        return [
            f"no checkpoint of step {_listed(missing)} was written, train.save_every="
            f"{keeping.saves} asks for it; {others}"
        ]
    return []


def _other_ones_kept(rank: RankLog, kept: object, keeping: Keeping) -> list[str]:
    """Checkpoints on the disk that are not those which config and evaluations leave."""
    written = _written(rank)
    losses = {
        step: float(loss)
        for told in rank.evaluations
        if isinstance(step := told.get("step"), int)
        and isinstance(loss := told.get("loss"), int | float)
    }
    wanted = keeping.stay(written, losses)
    if kept == wanted:
        return []
    evaluated = [f"{losses[step]:.4f} at {step}" for step in sorted(written) if step in losses]
    of = f"; validation loss {', '.join(evaluated)}" if keeping.best and evaluated else ""
    return [
        f"checkpoints of the steps {_listed(kept)} were kept, train.keep_last={keeping.last}, "
        f"keep_every={keeping.every} and keep_best={str(keeping.best).lower()} keep "
        f"{_listed(wanted)}{of}"
    ]


def _listed(steps: object) -> str:
    return listed(steps, _NAMED) if isinstance(steps, list) and steps else str(steps)
