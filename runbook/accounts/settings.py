"""What the launch was given: the ranks run with its settings, and keep its checkpoints.

That env.json tells the settings of the plan is another row's to say. Checkpoints hold what the run
held, and the right ones were kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from nsa.contract import THREAD_VARIABLES, TIMEOUT_TOLERANCE_S, Event, NSAError, checkpoint_step
from nsa.toggles import TOGGLES, Value
from runbook.accounts import Keeping, Workload, due, each_rank
from runbook.errors import listed
from runbook.folder.launch.documents import recorded_toggles
from runbook.folder.launch.shapes import is_number
from runbook.records.evidence import RankLog

_CAP, _TIMEOUT = "NSA_DDP_BUCKET_MB", "NSA_PG_TIMEOUT_MIN"
_MIB = 2**20
# From so many steps on DDP has settled its buckets, whatever its options.
_SETTLED = 4
_SHOWN = 4
_PLAIN = re.compile(r"[1-9][0-9]{0,5}")


def settings_account(
    ranks: Sequence[RankLog], env: Mapping[str, Any], given: Mapping[str, str]
) -> list[str]:
    """Every setting that the ranks do not run with as it was given.

    given: the variables that the launch was planned with, as far as they are known.
    """
    return [
        *bucket_account(ranks, env),
        *timeout_account(ranks, env),
        *thread_account(ranks, given),
    ]


def bucket_account(ranks: Sequence[RankLog], env: Mapping[str, Any]) -> list[str]:
    """Every rank's DDP made the buckets that the cap in force makes of its parameters."""
    problems: dict[str, None] = {}
    for rank in ranks:
        if not rank.ddp_buckets and len(ranks) > 1 and _settled(rank, env):
            problems[f"rank {rank.rank} does not tell which buckets DDP made"] = None
        for told in rank.ddp_buckets:
            where = f" in arm {told.get('arm')}" if told.get("arm") else ""
            for text in _bucket_problems(told, env):
                problems[f"rank {rank.rank}{where}: {text}"] = None
    return list(problems)


def _settled(rank: RankLog, env: Mapping[str, Any]) -> bool:
    """Did a block last long enough for DDP to have settled? Those of arms may be short."""
    return rank.steps is not None and len(rank.steps) >= _SETTLED and not env.get("arms")


def _bucket_problems(told: Mapping[str, Any], env: Mapping[str, Any]) -> Iterator[str]:
    """Buckets that the cap does not make.

    DDP puts parameters into a bucket until it holds the cap or more, and begins the next. So no
    bucket has the cap without its last parameter, and all but the one that was left over have it.
    """
    sizes, last = (told.get(name) or () for name in ("bytes", "last_bytes"))
    if not sizes or len(sizes) != len(last):
        yield "DDP's buckets are told without the bytes of each and of its last parameter"
        return
    cap = in_force(_CAP, told, env)
    if not isinstance(cap, int | float) or not is_number(cap):
        yield f"env.json does not say which {_CAP} is in force"
        return
    above = max(size - end for size, end in zip(sizes, last, strict=True))
    most = min(sorted(sizes)[1:], default=math.inf)
    if not (math.isfinite(cap * _MIB) and above < int(cap * _MIB) <= most):
        limits = f"a cap above {above / _MIB:.4g}"
        limits += " MiB" if most == math.inf else f" and up to {most / _MIB:.4g} MiB"
        limits = limits if above < most else "no single cap"
        shown = "/".join(f"{size / _MIB:.4g}" for size in sizes[:_SHOWN])
        more = "/..." if len(sizes) > _SHOWN else ""
        yield f"DDP's buckets ({shown}{more} MiB) are those of {limits}, {_CAP}={cap:g}"


def timeout_account(ranks: Sequence[RankLog], env: Mapping[str, Any]) -> list[str]:
    """The process group of every rank gives up when it was told to."""
    asked = in_force(_TIMEOUT, {}, env)
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


def bucket_words(ranks: Sequence[RankLog]) -> str:
    """Words for a launch whose buckets show nothing of their cap; empty where they do."""
    told = [event for rank in ranks for event in rank.ddp_buckets]
    if not told or any(len(event.get("bytes") or ()) > 1 for event in told):
        return ""
    return f"; all gradients are in one bucket, which shows only that {_CAP} is no less"


def in_force(name: str, told: Mapping[str, Any], env: Mapping[str, Any]) -> Value:
    """A toggle's value in the block that `told` is about; None where env.json has none.

    A block's own value counts, then that of the launch, then the default.
    """
    blocks = (env.get("arms") or {}).get("blocks") or ()
    for block in blocks:
        same = all(block.get(key) == told.get(key) for key in ("block", "arm"))
        if same and name in (block.get("set") or {}):
            try:
                return TOGGLES[name].parse(block["set"][name])
            except NSAError:
                return None
    given = recorded_toggles(env)
    value: Value = given.get(name, TOGGLES[name].default)
    return value


# A long run saves hundreds of times.
_NAMED = 8


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
