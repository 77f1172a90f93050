"""What is gathered once nothing of a launch is alive: the last word on its cause, and the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runbook.launch.classify import End
from runbook.launch.flight import Flight, find_desync, find_straggler, flight_files, read_flights
from runbook.launch.incident import write_summary
from runbook.launch.ranks import RankState
from runbook.records import LaunchStatus

__all__ = ["bundle"]

# Ends that are nobody's fault need no summary of every rank.
_NO_INCIDENT = (LaunchStatus.CONFIG_ERROR, LaunchStatus.INTERRUPTED)
# Ends that a desynchronised collective can have; in all others its record only repeats them.
_MAY_BE_DESYNC = (LaunchStatus.CRASHED, LaunchStatus.HUNG, LaunchStatus.TIMED_OUT)


def bundle(
    run_dir: Path, ranks: Sequence[RankState], end: End, *, token: str
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
    end = _exact(end, flights)
    files = [p for p in sorted(run_dir.glob("stackdump_rank*.txt")) if p.stat().st_size]
    files += flight_files(run_dir).values()
    files += [p for name in (".anomaly_type", "anomalies.jsonl") if (p := run_dir / name).is_file()]
    summary = run_dir / "incident.json"
    if end.status in _NO_INCIDENT:
        return end, files, ()
    if not summary.exists():
        write_summary(run_dir, ranks, end.cause)
    return end, [*files, summary], ()


def _exact(end: End, flights: dict[int, Flight]) -> End:
    desync = find_desync(flights) if end.status in _MAY_BE_DESYNC else None
    if desync is None:
        return end
    culprit = end.culprit_rank if desync.rank is None else desync.rank
    return replace(end, cause=f"{desync.text()} ({end.cause})", culprit_rank=culprit)
