"""One launch on one rank: each ceiling with all its times, the document, the end.

Of each there is a warm-up, and repeats whose times are all kept. Results are held against what they
must be; nothing else is judged here. On CUDA the times come from events in the stream; nothing is
synchronized between the first and the last repeat. The host's clock around all of them is the
second source.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nsa.contract import CEILINGS_JSON, Ceiling, Event, ExitCode, Phase
from nsa.launch.envfile import device_facts
from nsa.launch.output import MIB, Heartbeat, write_json
from nsa.launch.plan import Place
from nsa.launch.process import Termination, open_run_dir
from nsa.launch.ranks import Ranks, device_of, join_ranks
from nsa.step.numbers import StepClock
from nsa.train.session import Ending, run_rank
from nsa.train.settle import End

# Clocks of an idle card are low; it has them up after this time of work, or these rounds.
_WARM_UP_S = 0.25
_WARM_UP_ROUNDS = 2
# The whole program takes seconds, so that a collective of a minute is stuck.
_STUCK = timedelta(minutes=1)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much one call does. `inner` calls are one repeat, so that the clock is no part of it."""

    matmul: int
    dtype: torch.dtype
    memory_bytes: int
    host_bytes: int
    reduce_bytes: int
    repeats: int
    inner: int
    latency_inner: int


# A matrix product that fills an A100 or an H200 (1.1 TFLOP), copies far above their caches.
ON_CUDA = Sizes(
    matmul=8192, dtype=torch.bfloat16, memory_bytes=2048 * MIB, host_bytes=256 * MIB,
    reduce_bytes=256 * MIB, repeats=10, inner=5, latency_inner=20,
)  # fmt: skip
ON_CPU = Sizes(
    matmul=768, dtype=torch.float32, memory_bytes=64 * MIB, host_bytes=0,
    reduce_bytes=4 * MIB, repeats=5, inner=1, latency_inner=5,
)  # fmt: skip
# Entries of a row that are not zero, on average, in the product that has to be exact.
_FILLED = 64
# So many whole numbers before they repeat, in an all-reduce.
_PLACES = 61
_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class Bench:
    """The measurements of one rank. Those of `Ceiling` are collectives: every rank calls each."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.device = ranks, ranks.device
        self.sizes = ON_CUDA if self.device.type == "cuda" else ON_CPU

    def measure(self, what: Ceiling) -> dict[str, Any] | None:
        """One entry of the document; None where this machine has no such thing."""
        sizes = self.sizes
        ways: dict[Ceiling, Callable[[], dict[str, Any] | None]] = {
            Ceiling.MATMUL: self._matmul,
            Ceiling.MEMORY_COPY: self._memory_copy,
            Ceiling.HOST_COPY: self._host_copy,
            Ceiling.ALL_REDUCE: lambda: self._reduce(sizes.reduce_bytes, sizes.inner),
            # The smallest there is.
            Ceiling.LATENCY: lambda: self._reduce(4, sizes.latency_inner),
        }
        self.wait_for_all()
        return ways[what]()

    def wait_for_all(self) -> None:
        """Returns when every rank has come here and is idle."""
        self.ranks.sum([0.0])
        self._synchronize()

    def _matmul(self) -> dict[str, Any]:
        """Random numbers: on zeros a card draws less power and shows more than training gets."""
        size, kind = self.sizes.matmul, self.sizes.dtype
        source = torch.Generator(device=self.device).manual_seed(self.ranks.rank)
        one, other = (
            torch.randn(size, size, generator=source, device=self.device).to(kind) for _ in range(2)
        )
        product = torch.empty(size, size, dtype=kind, device=self.device)

        def multiply() -> None:
            torch.mm(one, other, out=product)

        multiply()
        first = product.clone()
        times = self._timed(multiply, work=2.0 * size**3 / 1e12, unit="TFLOP/s")
        wrong = "" if torch.equal(first, product) else "two products of the same matrices differ"
        return {"dtype": _NAMES[kind], "size": size, **times, **_said(self._inexact() or wrong)}

    def _inexact(self) -> str:
        """What is wrong with a product of whole numbers; empty where every one of them is right.

        A row of the first matrix has at most some hundred entries that are not zero, all of them
        +-1, so that no sum rounds in any type. The product is held against the matrices through a
        vector of +-1, which each wrong number of a row changes.
        """
        size, kind = self.sizes.matmul, self.sizes.dtype
        source = torch.Generator(device=self.device).manual_seed(self.ranks.rank)

        def signs(*shape: int) -> Tensor:
            return torch.randint(2, shape, generator=source, device=self.device) * 2.0 - 1.0

        there = torch.rand(size, size, generator=source, device=self.device) < _FILLED / size
        one, other, vector = signs(size, size) * there, signs(size, size), signs(size)
        product = torch.mm(one.to(kind), other.to(kind)).float()
        through = (one * (other * vector).sum(1)).sum(1)
        rows = int(((product * vector).sum(1) != through).sum())
        return f"{rows} of {size} rows of an exact product are wrong" if rows else ""

    def _memory_copy(self) -> dict[str, Any]:
        """Each byte is read once and written once."""
        size = self.sizes.memory_bytes
        return self._copied(torch.ones(size, dtype=torch.uint8, device=self.device), passes=2.0)

    def _host_copy(self) -> dict[str, Any] | None:
        """From pinned memory, one rank after the other: cards may share their way to the host."""
        if self.device.type != "cuda":
            return None
        found: dict[str, Any] | None = None
        for turn in range(self.ranks.world_size):
            if turn == self.ranks.rank:
                source = torch.ones(self.sizes.host_bytes, dtype=torch.uint8).pin_memory()
                found = self._copied(source, passes=1.0)
            self.wait_for_all()
        return found

    def _copied(self, source: Tensor, *, passes: float) -> dict[str, Any]:
        """Ones to the device; each of them passes the memory that limits it so many times."""
        size = source.numel()
        target = torch.zeros(size, dtype=torch.uint8, device=self.device)
        copy = partial(target.copy_, source, non_blocking=True)
        times = self._timed(copy, work=passes * size / 1e9)
        wrong = "" if bool(target.eq(1).all()) else "a copy differs from its source"
        return {"bytes": size, **times, **_said(wrong)}

    def _reduce(self, size: int, inner: int) -> dict[str, Any] | None:
        """Bus bandwidth as nccl-tests count it: each rank's link carries 2 (N - 1) / N bytes."""
        count = self.ranks.world_size
        if count == 1:
            return None
        # Whole numbers, other ones in each place, whose sums are exact.
        place = torch.arange(size // 4, device=self.device, dtype=torch.float32) % _PLACES + 1
        right, total = True, place * (count * (count + 1) / 2)
        for _ in range(self.sizes.repeats):
            tensor = place * (self.ranks.rank + 1)
            dist.all_reduce(tensor)
            right = right and torch.equal(tensor, total)
        work = size * 2.0 * (count - 1) / count / 1e9
        zeros = torch.zeros_like(tensor)
        times = self._timed(lambda: dist.all_reduce(zeros), work=work, together=inner)
        wrong = "" if right and not bool(zeros.any()) else "the sum of all ranks is wrong"
        return {"bytes": size, "ranks": count, **times, **_said(wrong)}

    def _timed(
        self, call: Callable[[], object], *, work: float, unit: str = "GB/s", together: int = 0
    ) -> dict[str, Any]:
        """Seconds of a call, of each repeat, and the rate of `work` of one call in `unit`.

        together: calls of a repeat, where every rank has to call it equally often.
        """
        inner = together or self.sizes.inner
        until = time.perf_counter() + (_WARM_UP_S if self.device.type == "cuda" else 0.0)
        rounds = 0
        while rounds < _WARM_UP_ROUNDS or (time.perf_counter() < until and not together):
            for _ in range(inner):
                call()
            self._synchronize()
            rounds += 1
        if together:
            self.wait_for_all()
        began = time.perf_counter()
        clock, marks = StepClock(self.device), []
        for _ in range(self.sizes.repeats):
            for _ in range(inner):
                call()
            marks.append(clock.tick())
        self._synchronize()
        host_s = time.perf_counter() - began
        seconds = [mark.seconds() / inner for mark in marks]
        rate = work / statistics.median(seconds)
        return {"inner": inner, "seconds": seconds, "host_s": host_s, "rate": rate, "unit": unit}

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _said(wrong: str) -> dict[str, str]:
    """The field that an entry has only where its results are wrong."""
    return {"wrong": wrong} if wrong else {}


def run(
    asked: str,
    place: Place,
    termination: Termination,
    *,
    run_dir: Path | None,
    token: str,
) -> int:
    """Measure and write; returns the exit code after it was written as the last heartbeat.

    Without a run directory rank 0 prints the document, and nothing is written.
    """
    beat, ending = Heartbeat(rank=place.rank, token=token), Ending()
    grouped = place.from_torchrun and place.world_size > 1

    def measure() -> None:
        if run_dir is not None:
            open_run_dir(run_dir, place, beat, grouped=grouped)
        device = device_of(place, asked, asked_by="--device")
        if device.type == "cuda":
            beat.cuda_mib = lambda: round(torch.cuda.memory_allocated() / MIB, 1)
        ranks = join_ranks(place, device, grouped=grouped, timeout=_STUCK)
        beat.write(Event.INIT_DONE)
        beat.phase = Phase.STEP
        bench = Bench(ranks)
        own: dict[str, Any] = {"rank": ranks.rank, "device": _device(device)}
        for what in Ceiling:
            beat.write(Event.CEILING_START, ceiling=what)
            own[what] = bench.measure(what)
        everything: list[Any] = [own] * ranks.world_size
        if ranks.world_size > 1:
            dist.all_gather_object(everything, own)
        if ranks.rank == 0:
            _write(run_dir, everything, token=beat.token)
        bench.wait_for_all()
        ranks.end()
        ending.end = End(code=ExitCode.SUCCESS, reason="everything is measured")

    return run_rank(measure, ending, beat, termination, grouped=grouped)


def _device(device: torch.device) -> dict[str, Any]:
    facts = device_facts(device, ranks=1)
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return {"type": facts["type"], "name": facts["name"], "uuid": uuid}


def _write(run_dir: Path | None, everything: list[dict[str, Any]], *, token: str) -> None:
    document = {
        "schema_version": 1,
        "run_token": token,
        "world_size": len(everything),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "ranks": everything,
    }
    if run_dir is None:
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        write_json(run_dir / CEILINGS_JSON, document)
