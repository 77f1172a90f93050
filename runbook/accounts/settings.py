"""Settings: what the ranks really run with is what the launch was given.

That env.json tells the settings of the plan is another row's to say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nsa.contract import THREAD_VARIABLES, TIMEOUT_TOLERANCE_S, NSAError
from nsa.toggles import TOGGLES, Value
from runbook.accounts import each_rank
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


@dataclass(frozen=True, kw_only=True)
class Caps:
    """The caps in bytes by which DDP makes some buckets: more than `above`, at most `most`.

    DDP puts parameters into a bucket until it holds the cap or more, and begins the next. So no
    bucket has the cap without its last parameter, and all but the one that was left over have it.
    """

    above: int
    most: float

    @classmethod
    def of(cls, sizes: Sequence[int], last: Sequence[int]) -> Caps:
        """`last`: bytes of the parameter that each bucket of `sizes` bytes got last."""
        full = sorted(sizes)[1:]
        above = max(size - end for size, end in zip(sizes, last, strict=True))
        return cls(above=above, most=min(full, default=math.inf))

    def hold(self, cap: float) -> bool:
        """Are these the buckets that this cap makes?"""
        return math.isfinite(cap) and self.above < int(cap) <= self.most

    def __str__(self) -> str:
        if self.above >= self.most:
            return "no single cap"
        most = "" if self.most == math.inf else f" and up to {self.most / _MIB:.4g}"
        return f"a cap above {self.above / _MIB:.4g}{most} MiB"


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
    sizes, last = (told.get(name) or () for name in ("bytes", "last_bytes"))
    if not sizes or len(sizes) != len(last):
        yield "DDP's buckets are told without the bytes of each and of its last parameter"
        return
    cap = in_force(_CAP, told, env)
    if not isinstance(cap, int | float) or not is_number(cap):
        yield f"env.json does not say which {_CAP} is in force"
        return
    caps = Caps.of(sizes, last)
    if not caps.hold(cap * _MIB):
        shown = "/".join(f"{size / _MIB:.4g}" for size in sizes[:_SHOWN])
        more = "/..." if len(sizes) > _SHOWN else ""
        yield f"DDP's buckets ({shown}{more} MiB) are those of {caps}, {_CAP}={cap:g}"


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
    if threads != int(omp) and not _one_a_core(threads, int(omp), told.get("cpus")):
        yield f" computes with {threads} threads, {THREAD_VARIABLES[0]}={omp}"


def _one_a_core(threads: int, asked: int, cpus: int | None) -> bool:
    """Are there fewer threads than asked for because MKL takes one for each core at most?

    A core has one CPU, or two that share it.
    """
    return cpus is not None and threads < asked and cpus <= 2 * threads


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
