"""What is gathered once nothing of a launch is alive: the last word on its cause, and the files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nsa.contract import STACKDUMPS
from runbook.launch.classify import End
from runbook.launch.flight import (
    Flight,
    find_desync,
    find_straggler,
    flight_files,
    left_the_pattern,
    read_flights,
)
from runbook.launch.incident import python_place, write_summary
from runbook.launch.ranks import RankState
from runbook.records import LaunchStatus

__all__ = ["bundle"]

# Ends that are nobody's fault need no summary of every rank.
_NO_INCIDENT = (LaunchStatus.CONFIG_ERROR, LaunchStatus.INTERRUPTED)
# Ends that a desynchronised collective can have; in all others its record only repeats them.
_MAY_BE_DESYNC = (LaunchStatus.CRASHED, LaunchStatus.HUNG, LaunchStatus.TIMED_OUT)
# gloo ends the process, from a thread of its own, when what comes is larger than what it waits for.
_TOO_LARGE = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")


def bundle(
    run_dir: Path, ranks: Sequence[RankState], end: End, *, token: str, console: Sequence[str]
) -> tuple[End, list[Path], tuple[str, ...]]:
    """The end with its cause made exact by the flight records, the evidence, and notes.

    A good end has no evidence; it may have a note about a rank that was always late. For a bad
    one the files are the incident's summary, every stack and flight record, and what a watcher
    wrote.
    """
    flights = read_flights(run_dir, token=token)
    if end.status is LaunchStatus.COMPLETED:
        straggler = find_straggler(flights)
        return end, [], (straggler.text(),) if straggler else ()
    end = _exact(end, flights, run_dir, console)
    files = [p for p in sorted(run_dir.glob(STACKDUMPS.glob())) if p.stat().st_size]
    files += flight_files(run_dir).values()
    files += [p for name in (".anomaly_type", "anomalies.jsonl") if (p := run_dir / name).is_file()]
    summary = run_dir / "incident.json"
    if end.status in _NO_INCIDENT:
        return end, files, ()
    if not summary.exists():
        write_summary(run_dir, ranks, end.cause)
    return end, [*files, summary], ()


def _exact(end: End, flights: dict[int, Flight], run_dir: Path, console: Sequence[str]) -> End:
    if end.status not in _MAY_BE_DESYNC:
        return end
    desync = find_desync(flights)
    if desync is not None:
        culprit = end.culprit_rank if desync.rank is None else desync.rank
        return replace(end, cause=f"{desync.text()} ({end.cause})", culprit_rank=culprit)
    said = next((m for line in console if (m := _TOO_LARGE.search(line))), None)
    if said is None or end.culprit_rank is None or end.culprit_rank in flights:
        return end
    return _aborted(end, end.culprit_rank, flights, run_dir, f"{said[1]} for {said[2]}")


def _aborted(end: End, aborted: int, flights: dict[int, Flight], run_dir: Path, sizes: str) -> End:
    """A desync that ended one rank on the spot: the others' records say whether it was theirs."""
    told = {rank: f.collectives[-1] for rank, f in flights.items() if f.collectives}
    stacks = [p for p in run_dir.glob(STACKDUMPS.glob(aborted)) if p.stat().st_size]
    place = python_place(stacks[0]) if stacks else ""
    seen = [f"rank {rank}: {last.text()}" for rank, last in sorted(told.items())]
    seen.append(f"rank {aborted} was ended at {place or 'an unknown place'}")
    number = max((last.seq for last in told.values()), default=0)
    cause = f"desync at collective {number}, sizes {sizes}: {'; '.join(seen)} ({end.cause})"
    strayed = [rank for rank in told if left_the_pattern(flights[rank])]
    culprit = strayed[0] if len(strayed) == 1 else aborted
    return replace(end, cause=cause, culprit_rank=culprit)
