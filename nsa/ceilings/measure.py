"""One number at a time: warm-up, repeats, every time kept. Nothing is judged here.

On CUDA the times come from events in the stream; nothing is synchronized between the first and the
last repeat. The host's clock around all of them is the second source.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nsa.contract import Ceiling
from nsa.launch.ranks import Ranks

# Clocks of an idle card are low; it has them up after this time of work, or these rounds.
_WARM_UP_S = 0.25
_WARM_UP_ROUNDS = 2
_MIB = 1 << 20


class WrongResult(RuntimeError):
    """A device or a link returned other numbers than it must."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much one call does. `inner` calls are one repeat, so that the clock is no part of it."""

    matmul: int
    dtype: str
    memory_bytes: int
    host_bytes: int
    reduce_bytes: int
    repeats: int
    inner: int
    latency_inner: int


# A matrix product that fills an A100 or an H200 (1.1 TFLOP), copies far above their caches.
ON_CUDA = Sizes(
    matmul=8192,
    dtype="bf16",
    memory_bytes=2048 * _MIB,
    host_bytes=256 * _MIB,
    reduce_bytes=256 * _MIB,
    repeats=10,
    inner=5,
    latency_inner=20,
)
ON_CPU = Sizes(
    matmul=768,
    dtype="fp32",
    memory_bytes=64 * _MIB,
    host_bytes=0,
    reduce_bytes=4 * _MIB,
    repeats=5,
    inner=1,
    latency_inner=5,
)
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one call, for each repeat, and of all repeats by the host's clock."""

    seconds: list[float]
    host_s: float
    inner: int

    def document(self, *, work: float, unit: str, scale: float, **what: Any) -> dict[str, Any]:
        """The entry of the document; `work` of one call, `scale` of the unit."""
        return {
            **what,
            "inner": self.inner,
            "seconds": self.seconds,
            "host_s": self.host_s,
            "rate": work / statistics.median(self.seconds) / scale,
            "unit": unit,
        }


class Bench:
    """The measurements of one rank. Those of `Ceiling` are collectives: every rank calls each."""

    def __init__(self, ranks: Ranks, sizes: Sizes | None = None) -> None:
        self.ranks, self.device = ranks, ranks.device
        self.sizes = sizes or (ON_CUDA if self.device.type == "cuda" else ON_CPU)

    def measure(self, what: Ceiling) -> dict[str, Any] | None:
        """One entry of the document; None where this machine has no such thing."""
        ways = {
            Ceiling.MATMUL: self._matmul,
            Ceiling.MEMORY_COPY: self._memory_copy,
            Ceiling.HOST_COPY: self._host_copy,
            Ceiling.ALL_REDUCE: self._all_reduce,
            Ceiling.LATENCY: self._latency,
        }
        self.wait_for_all()
        return ways[what]()

    def wait_for_all(self) -> None:
        """Returns when every rank has come here and is idle."""
        self.ranks.sum([0.0])
        self._synchronize()

    def _matmul(self) -> dict[str, Any]:
        """Random numbers: on zeros a card draws less power and shows more than training gets."""
        size, kind = self.sizes.matmul, _DTYPES[self.sizes.dtype]
        source = torch.Generator(device=self.device).manual_seed(self.ranks.rank)
        one, other = (
            torch.randn(size, size, generator=source, device=self.device).to(kind) for _ in range(2)
        )
        product = torch.empty(size, size, dtype=kind, device=self.device)

        def multiply() -> None:
            torch.mm(one, other, out=product)

        multiply()
        first = product.clone()
        times = self._timed(multiply, self.sizes.inner)
        if not torch.equal(first, product):
            raise WrongResult("two products of the same matrices differ")
        what = {"dtype": self.sizes.dtype, "size": size}
        return times.document(work=2.0 * size**3, unit="TFLOP/s", scale=1e12, **what)

    def _memory_copy(self) -> dict[str, Any]:
        """Each byte is read once and written once."""
        source, target = (self._bytes(self.sizes.memory_bytes, fill) for fill in (1, 0))
        times = self._timed(lambda: target.copy_(source), self.sizes.inner)
        if not torch.equal(source, target):
            raise WrongResult("a copy in the device's memory differs from its source")
        size = source.numel()
        return times.document(work=2.0 * size, unit="GB/s", scale=1e9, bytes=size)

    def _host_copy(self) -> dict[str, Any] | None:
        """From pinned memory, one rank after the other: cards may share their way to the host."""
        if self.device.type != "cuda":
            return None
        found: dict[str, Any] | None = None
        for turn in range(self.ranks.world_size):
            if turn == self.ranks.rank:
                found = self._copy_from_host()
            self.wait_for_all()
        return found

    def _copy_from_host(self) -> dict[str, Any]:
        size = self.sizes.host_bytes
        source = torch.ones(size, dtype=torch.uint8).pin_memory()
        target = self._bytes(size, 0)
        times = self._timed(lambda: target.copy_(source, non_blocking=True), self.sizes.inner)
        if int(target.sum()) != size:
            raise WrongResult("a copy from the host's memory differs from its source")
        return times.document(work=float(size), unit="GB/s", scale=1e9, bytes=size)

    def _all_reduce(self) -> dict[str, Any] | None:
        return self._reduce(self.sizes.reduce_bytes, self.sizes.inner)

    def _latency(self) -> dict[str, Any] | None:
        """The smallest all-reduce."""
        return self._reduce(4, self.sizes.latency_inner)

    def _reduce(self, size: int, inner: int) -> dict[str, Any] | None:
        """Bus bandwidth as nccl-tests count it: each rank's link carries 2 (N - 1) / N bytes."""
        count = self.ranks.world_size
        if count == 1:
            return None
        self._check_sum(size)
        tensor = torch.zeros(size // 4, device=self.device)
        times = self._timed(lambda: torch.distributed.all_reduce(tensor), inner, together=True)
        work = size * 2.0 * (count - 1) / count
        return times.document(work=work, unit="GB/s", scale=1e9, bytes=size, ranks=count)

    def _check_sum(self, size: int) -> None:
        tensor = torch.full((size // 4,), float(self.ranks.rank + 1), device=self.device)
        torch.distributed.all_reduce(tensor)
        count = self.ranks.world_size
        if not bool((tensor == count * (count + 1) / 2).all()):
            raise WrongResult("the sum of all ranks is wrong")

    def _timed(self, call: Callable[[], object], inner: int, *, together: bool = False) -> Times:
        """Seconds of a call. `together`: every rank has to call it equally often."""
        self._warm_up(call, inner, together=together)
        if together:
            self.wait_for_all()
        if self.device.type == "cuda":
            return self._by_events(call, inner)
        return self._by_clock(call, inner)

    def _warm_up(self, call: Callable[[], object], inner: int, *, together: bool) -> None:
        until = time.perf_counter() + (_WARM_UP_S if self.device.type == "cuda" else 0.0)
        rounds = 0
        while rounds < _WARM_UP_ROUNDS or (time.perf_counter() < until and not together):
            for _ in range(inner):
                call()
            self._synchronize()
            rounds += 1

    def _by_events(self, call: Callable[[], object], inner: int) -> Times:
        marks = [_mark() for _ in range(self.sizes.repeats + 1)]
        began = time.perf_counter()
        marks[0].record()
        for mark in marks[1:]:
            for _ in range(inner):
                call()
            mark.record()
        self._synchronize()
        host_s = time.perf_counter() - began
        seconds = [before.elapsed_time(after) / 1e3 / inner for before, after in pairwise(marks)]
        return Times(seconds=seconds, host_s=host_s, inner=inner)

    def _by_clock(self, call: Callable[[], object], inner: int) -> Times:
        marks = [time.perf_counter()]
        for _ in range(self.sizes.repeats):
            for _ in range(inner):
                call()
            marks.append(time.perf_counter())
        seconds = [(after - before) / inner for before, after in pairwise(marks)]
        return Times(seconds=seconds, host_s=marks[-1] - marks[0], inner=inner)

    def _bytes(self, size: int, fill: int) -> Tensor:
        return torch.full((size,), fill, dtype=torch.uint8, device=self.device)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _mark() -> Any:
    """An event that knows its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
