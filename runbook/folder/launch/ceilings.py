"""ceilings.json: what the devices and links can do, computed again from sizes and times.

The rates that the document tells are its second source, the host's clock around all repeats the
third. Whatever is missing or does not agree is a sentence, so that no number rests on half a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from nsa.contract import CEILINGS_JSON, Ceiling
from runbook.folder.launch.shapes import CEILINGS, shaped

# Fewer are no median.
FEWEST_REPEATS = 3
# A rate is written in full digits; only the order of operations differs.
_RATE_TOLERANCE = 1e-6
# The repeats are inside what the host's clock saw of them, and fill it but for the first start.
_CLOCK_TOLERANCE = 0.05
_LEAST_FILLED = 0.5
_TERA, _GIGA = 1e12, 1e9


class CeilingsError(ValueError):
    """What is wrong with a document; the message says where."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One number of one rank: `rate` in `unit`, from the median of `repeats` times of a call.

    size: of a call, the side of its matrices or its bytes.
    """

    rank: int
    device_type: str
    device_name: str
    uuid: str | None
    rate: float
    unit: str
    seconds: float
    repeats: int
    size: int
    how: str

    @property
    def where(self) -> str:
        """`rank 1 (NVIDIA A100, GPU-1234)`."""
        known = ", ".join(text for text in (self.device_name, self.uuid) if text)
        return f"rank {self.rank} ({known})" if known else f"rank {self.rank}"


def read_measured(
    document: Mapping[str, Any], what: Ceiling, *, nproc: int, token: str = ""
) -> list[Measured]:
    """One ceiling of every rank, slowest first; empty where no rank has such a thing.

    `nproc` and `token` are those of the launch that wrote the document. Raises `CeilingsError`.
    """
    document, _ = shaped(document, CEILINGS, CEILINGS_JSON)
    if token and document.get("run_token") != token:
        raise CeilingsError(f"{CEILINGS_JSON} is of another launch: its run_token is not this one")
    ranks = _all_ranks(document, nproc)
    if not any(one.get(what) for one in ranks):
        return []
    found = [_measured(one, what, nproc) for one in ranks]
    return sorted(found, key=lambda one: one.rate)


def _all_ranks(document: Mapping[str, Any], nproc: int) -> list[Mapping[str, Any]]:
    """The entries of exactly the ranks that were started."""
    ranks = document.get("ranks")
    if not ranks:
        raise CeilingsError(f"{CEILINGS_JSON} has no usable list `ranks`")
    seen = [one.get("rank") for one in ranks]
    if sorted(seen, key=str) != list(range(nproc)) or document.get("world_size") != nproc:
        raise CeilingsError(
            f"{CEILINGS_JSON} tells of ranks {seen} and world_size {document.get('world_size')}, "
            f"the launch has {nproc} ranks"
        )
    return list(ranks)


def _measured(rank: Mapping[str, Any], what: Ceiling, nproc: int) -> Measured:
    where = f"{CEILINGS_JSON}: {what} of rank {rank['rank']}"
    one = rank.get(what)
    if not one:
        raise CeilingsError(f"{where} is missing, other ranks have it")
    times, host_s, inner = one.get("seconds"), one.get("host_s"), one.get("inner")
    if not times or len(times) < FEWEST_REPEATS:
        raise CeilingsError(f"{where} has {len(times or ())} repeats, {FEWEST_REPEATS} are needed")
    if not min(times) > 0.0:
        raise CeilingsError(f"{where} took {min(times)} s, which is impossible")
    if not host_s or not inner or host_s <= 0.0 or inner < 1:
        raise CeilingsError(f"{where} has no usable host_s and inner")
    filled = inner * sum(times) / host_s
    if not _LEAST_FILLED <= filled <= 1.0 + _CLOCK_TOLERANCE:
        took = f"its repeats took {inner * sum(times):.4g} s"
        raise CeilingsError(f"{where}: {took}, by the host's clock {host_s:.4g} s")
    work, unit, size, how = _work(one, what, nproc, where)
    rate = work / median(times)
    if not abs((one.get("rate") or 0.0) / rate - 1.0) <= _RATE_TOLERANCE or one.get("unit") != unit:
        told = f"{one.get('rate')} {one.get('unit')}"
        raise CeilingsError(f"{where} tells {told}, its sizes and times give {rate:.6g} {unit}")
    device = rank.get("device") or {}
    return Measured(
        rank=rank["rank"],
        device_type=device.get("type") or "unknown",
        device_name=device.get("name") or "",
        uuid=device.get("uuid"),
        rate=rate,
        unit=unit,
        seconds=median(times),
        repeats=len(times),
        size=size,
        how=how,
    )


def _work(
    one: Mapping[str, Any], what: Ceiling, nproc: int, where: str
) -> tuple[float, str, int, str]:
    """Work of one call in the unit's multiples, the unit, its size, and how it was measured."""
    key = "size" if what is Ceiling.MATMUL else "bytes"
    size = one.get(key) or 0
    if size < 1:
        raise CeilingsError(f"{where} has no usable {key}")
    if what is Ceiling.MATMUL:
        cube = f"{one.get('dtype')}, {size} x {size} x {size}"
        return 2.0 * size**3 / _TERA, "TFLOP/s", size, cube
    # How often a byte is moved; in an all-reduce, by each of the ranks.
    moved, how = {
        Ceiling.MEMORY_COPY: (2.0, ", read and written"),
        Ceiling.HOST_COPY: (1.0, " from pinned memory"),
    }.get(what, (2.0 * (nproc - 1) / nproc, ", bus bandwidth"))
    text = f"{size / 2**20:g} MiB" if size >= 2**10 else f"{size} bytes"
    return moved * size / _GIGA, "GB/s", size, f"{text}{how}"
