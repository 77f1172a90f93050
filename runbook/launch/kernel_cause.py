"""What the machine adds to a bad end: a GPU that failed, a rank that was killed, a limit met."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from runbook.folder.launch.kernel_lines import (
    XIDS,
    KernelLine,
    concerns,
    describe,
    is_hardware_fault,
)
from runbook.launch.end import TAIL_LINES, signal_name
from runbook.machine.surroundings import limit_met
from runbook.records import End, Kind, LaunchStatus, RankExit

# Ends that a GPU which fails can have; all others have a cause of their own.
_MAY_BE_HARDWARE = (
    LaunchStatus.CRASHED,
    LaunchStatus.HUNG,
    LaunchStatus.SILENT,
    LaunchStatus.TIMED_OUT,
    LaunchStatus.NON_FINITE,
    LaunchStatus.HALTED,
)


def with_kernel_log(
    end: End, lines: Sequence[KernelLine], *, slots: Collection[str], pids: Mapping[int, int]
) -> End:
    """The end with the cause that the kernel logged while the launch ran.

    `slots` are the PCI places of the GPUs that the launch may use (errors of all count if none is
    known), `pids` the ranks' processes with their ranks. An Xid that no program can cause makes a
    crash or a hang a hardware error; any other one is named beside the cause.
    """
    if end.status not in _MAY_BE_HARDWARE:
        return end
    seen = [line for line in lines if line.xid is not None and concerns(line, slots)]
    for line in seen:
        if line.xid is not None and is_hardware_fault(line.xid) and "Nonfatal" not in line.text:
            cause = f"{_said(line)}; {XIDS[line.xid].remedy} ({end.cause})"
            return replace(end, status=LaunchStatus.HARDWARE_ERROR, cause=cause)
    killed = next((line for line in lines if line.pid in pids), None)
    if killed is not None and killed.pid is not None and end.status is LaunchStatus.CRASHED:
        rank = pids[killed.pid]
        cause = f"rank {rank}: the kernel killed it for memory, as its log says ({end.cause})"
        out = LaunchStatus.OUT_OF_MEMORY
        return End(status=out, cause=cause, culprit_rank=rank, kind=Kind.HOST_MEMORY)
    if seen:
        return replace(end, cause=f"{end.cause}; the kernel log says {_said(seen[0])}")
    return end


def with_limits(
    end: End,
    exits: Sequence[RankExit],
    *,
    child_code: int | None,
    console: Sequence[str],
    duration_s: float,
    folder: Path,
    least_free: int,
) -> End:
    """The end as the environment's fault, where a limit of the machine made it.

    `least_free`: the least room seen on the disk of the launch's `folder`, bytes.
    """
    killed = end.kind is Kind.HOST_MEMORY
    if killed or end.status not in (LaunchStatus.CRASHED, LaunchStatus.OUT_OF_MEMORY):
        return end
    signals = {one.signal for one in exits if one.rank == end.culprit_rank}
    met = limit_met(
        end.cause,
        signals=signals | {signal_name(child_code)},
        console=console[-TAIL_LINES:],
        duration_s=duration_s,
        folder=folder,
        least_free=least_free,
    )
    if not met:
        return end
    return replace(end, status=LaunchStatus.ENVIRONMENT_ERROR, cause=f"{met} ({end.cause})")


def _said(line: KernelLine) -> str:
    where = f"GPU {line.pci[0]}: " if line.pci else ""
    return f"{where}{describe(line.xid or 0)}"
