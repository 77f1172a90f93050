"""What the devices and links can do, as preflight measured it: its rows, and what others read.

A number below its floor is the card's, not a setting's, so it is INVALID and never FAIL. Those of
ceilings.json are computed again from sizes and times: its rates are their second source, the host's
clock around all repeats the third. No number rests on half a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from nsa.contract import CEILINGS_JSON, Ceiling
from phases.kit import CARDS_ALIKE, LEAST_COPY_MIB, LEAST_MATRIX
from phases.kit.case import Case
from phases.kit.finding import Finding, ending, invalid, missing, whole
from phases.kit.measure import against, file_value
from phases.kit.rows import Row, RowsOf
from runbook.records import Confidence, Measurement, Outcome, Reason
from runbook.records.evidence import LaunchEvidence

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

    where: the rank and its device, `rank 1 (NVIDIA A100, GPU-1234)`.
    size: of a call, the side of its matrices or its bytes. wrong: what is wrong with its results.
    """

    rank: int
    where: str
    device_type: str
    uuid: str | None
    rate: float
    unit: str
    seconds: float
    repeats: int
    size: int
    how: str
    wrong: str


def read_measured(
    document: Mapping[str, Any], what: Ceiling, *, nproc: int, token: str = ""
) -> list[Measured]:
    """One ceiling of every rank, slowest first; empty where no rank has such a thing.

    `nproc` and `token` are those of the launch that wrote the document. Raises `CeilingsError`.
    """
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
    # As text: a damaged one may not be a number.
    if (
        sorted(seen, key=str) != sorted(range(nproc), key=str)
        or document.get("world_size") != nproc
    ):
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
    known = ", ".join(filter(None, (device.get("name"), device.get("uuid"))))
    return Measured(
        rank=rank["rank"],
        where=f"rank {rank['rank']}{f' ({known})' if known else ''}",
        device_type=device.get("type") or "unknown",
        uuid=device.get("uuid"),
        rate=rate,
        unit=unit,
        seconds=median(times),
        repeats=len(times),
        size=size,
        how=how,
        wrong=one.get("wrong") or "",
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


LAUNCH = "ceilings"


def ceiling_rows() -> tuple[Row, ...]:
    """The rows of preflight."""
    row = RowsOf("preflight").one
    return (
        row("matmul", _row(Ceiling.MATMUL, "ceiling_matmul_tflops")),
        row("memory_copy", _row(Ceiling.MEMORY_COPY, "ceiling_memory_gb_s")),
        row("host_copy", _row(Ceiling.HOST_COPY, "ceiling_host_gb_s", Case.require_gpu)),
        row("all_reduce", _row(Ceiling.ALL_REDUCE, "ceiling_all_reduce_gb_s", Case.require_ranks)),
    )


def measured(case: Case, what: Ceiling, name: str = LAUNCH) -> list[Measured]:
    """One ceiling of every rank, slowest first, of preflight's case.

    Raises a finding where the launch did not end well, or its document is missing, damaged, of
    other devices than the profile's, or tells what cannot be.
    """
    launch, document = _launch(case, name)
    try:
        found = read_measured(
            document, what, nproc=launch.launch.nproc, token=launch.result.run_token
        )
    except CeilingsError as error:
        raise _damaged(launch, str(error)) from error
    if not found:
        raise _damaged(launch, f"{CEILINGS_JSON}: no rank measured {what}")
    wanted = case.profile.hardware.device
    for one in found:
        if one.device_type != wanted:
            reason = f"{one.where} was measured on {one.device_type}, the profile is for {wanted}"
            raise invalid(
                Reason.WRONG_ENVIRONMENT, reason, evidence=(launch.path("ceilings"),), topic="cuda"
            )
    return found


def slowest(case: Case, what: Ceiling) -> Measurement:
    """The slowest rank's rate, of preflight's case; raises as `measured` does."""
    return as_measurement(case, what, measured(case, what)[0])


def as_measurement(case: Case, what: Ceiling, one: Measured, name: str = LAUNCH) -> Measurement:
    """A number of one rank with its file."""
    launch, note = case.launch(name), f"{one.where}, median; {one.how}"
    return file_value(launch, "ceilings", str(what), one.rate, one.unit, n=one.repeats, note=note)


def _launch(case: Case, name: str = LAUNCH) -> tuple[LaunchEvidence, Mapping[str, Any]]:
    """The launch, which ended well, and its document."""
    launch = case.launch(name)
    end = ending(launch)
    if end.outcome is not Outcome.PASS:
        raise end
    if launch.ceilings is None:
        whole(launch, CEILINGS_JSON, "ceilings")
        raise missing(f"{name} wrote no {CEILINGS_JSON}", launch.path("console"))
    return launch, launch.ceilings


def _damaged(launch: LaunchEvidence, reason: str) -> Finding:
    """INVALID; where a field was left out for its type, that is the cause."""
    odd = [text for text in launch.problems if CEILINGS_JSON in text]
    cause = f" ({'; '.join(odd)})" if odd else ""
    paths = (launch.path("ceilings"),)
    return invalid(Reason.DAMAGED_ARTIFACT, f"{reason}{cause}", evidence=paths)


def _row(
    what: Ceiling, limit: str, require: Callable[[Case], None] = lambda _: None
) -> Callable[[Case], Finding]:
    def answer(case: Case) -> Finding:
        require(case)
        found = measured(case, what)
        value = as_measurement(case, what, found[0])
        small = measured(case, Ceiling.LATENCY) if what is Ceiling.ALL_REDUCE else []
        if sick := [one for one in (*found, *small) if one.wrong]:
            more = f" ({len(sick) - 1} more are wrong)" if len(sick) > 1 else ""
            text = f"{sick[0].wrong}, says {sick[0].where}{more}"
            return _bad_card(text, measurement=value, **_nodes_of(case, what, sick))
        if impossible := _not_measured(case, what, found):
            return invalid(Reason.NOT_PLAUSIBLE, impossible, measurement=value, topic="ceilings")
        if unlike := _unlike(case, what, found):
            behind = [one for one in found if one.rate < CARDS_ALIKE * found[-1].rate]
            where = _nodes_of(case, what, behind)
            return invalid(Reason.WRONG_ENVIRONMENT, unlike, measurement=value, **where)
        text = _text(found)
        if small:
            text += f"; a small one takes {max(one.seconds for one in small) * 1e6:.0f} us"
        floor = case.limit(limit)
        slow = [one for one in found if not floor.holds(one.rate)]
        beyond = partial(_bad_card, **_nodes_of(case, what, slow))
        return against(value, floor, text, beyond=beyond)

    return answer


def _nodes_of(case: Case, what: Ceiling, sick: Sequence[Measured]) -> dict[str, Any]:
    """Of a finding about these ranks' own devices, the nodes that they ran on.

    None where no node is without one, or of what all ranks do together: that is no node's own.
    """
    ran = {one.rank: one.node for one in case.launch(LAUNCH).result.ranks if one.node}
    nodes = tuple(dict.fromkeys(ran[one.rank] for one in sick if one.rank in ran))
    if what is Ceiling.ALL_REDUCE or set(nodes) == set(ran.values()):
        return {}
    return {"nodes": nodes, "confidence": Confidence.CONFIRMED}


def _text(found: Sequence[Measured]) -> str:
    """`241 TFLOP/s on rank 1 (...), the slowest of 2; the fastest 245`."""
    low, high = found[0], found[-1]
    text = f"{low.rate:.4g} {low.unit} on {low.where}"
    if len(found) > 1:
        text += f", the slowest of {len(found)} (the fastest has {high.rate:.4g})"
    return f"{text}; {low.how}, median of {low.repeats}"


def _not_measured(case: Case, what: Ceiling, found: Sequence[Measured]) -> str:
    """Why this number was not measured on such a device, or an empty string; slowest first."""
    if not case.profile.has_gpu:
        return ""
    kind, fastest = case.profile.workload.dtype, found[-1]
    if what is Ceiling.MATMUL and not fastest.how.startswith(f"{kind},"):
        return f"{fastest.how} was measured, the profile trains in {kind}"
    least = LEAST_MATRIX if what is Ceiling.MATMUL else LEAST_COPY_MIB * 2**20
    smallest = min(found, key=lambda one: one.size)
    if smallest.size < least:
        enough = f"{least}" if what is Ceiling.MATMUL else f"{LEAST_COPY_MIB} MiB"
        seen = f"{what} on {smallest.where} was measured with {smallest.how}"
        return f"{seen}: at least {enough} fills a GPU and leaves its cache"
    beyond = case.profile.hardware.peaks[what].beyond(fastest.rate)
    rate = f"{fastest.rate:.4g} {fastest.unit} on {fastest.where}"
    return f"{rate} is {beyond}; {fastest.how}" if beyond else ""


def _unlike(case: Case, what: Ceiling, found: Sequence[Measured]) -> str:
    """Why these cards do not belong together, or an empty string; `found` is slowest first."""
    if not case.profile.has_gpu or what not in (Ceiling.MATMUL, Ceiling.MEMORY_COPY):
        return ""
    low, high = found[0], found[-1]
    if low.rate >= CARDS_ALIKE * high.rate:
        return ""
    return (
        f"{_text(found)}: {low.rate / high.rate:.0%} of the fastest, cards of one kind reach at "
        f"least {CARDS_ALIKE:.0%}"
    )


def _bad_card(text: str, **found: Any) -> Finding:
    reason = f"{text}: the card or its link, not a setting"
    return invalid(Reason.WRONG_ENVIRONMENT, reason, **found)


def other_devices(case: Case, env: Mapping[str, Any]) -> str:
    """Why a launch with this env.json ran on other devices than were measured; or nothing.

    `case` is preflight's.
    """
    ran = set((env.get("device") or {}).get("uuids") or ())
    seen = {one.uuid for one in measured(case, Ceiling.MATMUL) if one.uuid}
    # torch writes a GPU's UUID without the `GPU-` of nvidia-smi.
    bare, known = ({one.removeprefix("GPU-") for one in names} for names in (ran, seen))
    if not ran or not seen or bare == known:
        return ""
    return f"preflight measured {', '.join(sorted(seen))}, trained was on {', '.join(sorted(ran))}"
