"""The evidence of a bad end: stacks and flight records of the ranks, and the cause they show."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from nsa.contract import FLIGHTS, NCCL_FLIGHTS, STACKDUMPS, RankFiles
from runbook.files import write_document
from runbook.folder import ANOMALIES_JSONL, ANOMALY_TYPE, INCIDENT_JSON
from runbook.folder.launch.documents import Load
from runbook.launch.end import said_by_watchdog
from runbook.launch.incident.flight import (
    Flight,
    find_desync,
    find_straggler,
    last_numbers,
    left_the_pattern,
    read_flights,
)
from runbook.launch.watch import RankWatch
from runbook.launch.watch.rank_state import RankState
from runbook.launch.watch.watchdog import STOPPED, Watchdog
from runbook.process import run_tool
from runbook.records import End, Kind, LaunchStatus

_FRAME = re.compile(r'^  File "([^"]*)", line (\d+) in (\S+)', re.MULTILINE)
# Installed packages, Python's own library, and what has no file.
_NOT_ITS_OWN = re.compile(r"/(?:site|dist)-packages/|/torch/|/lib/python3\.\d+/|^<")
# So many functions of its own tell where it was.
_OWN = 2
_STACKS_WITHIN_S = 1.0
_FLIGHTS_WITHIN_S = 0.5
_TOOL_WITHIN_S = 3.0
# Ends that no rank is to blame for need no summary of every rank.
_NO_INCIDENT = (LaunchStatus.CONFIG_ERROR, LaunchStatus.ENVIRONMENT_ERROR, LaunchStatus.INTERRUPTED)
# Ends that a desynchronised collective can have; in all others its record only repeats them.
_MAY_BE_DESYNC = (LaunchStatus.CRASHED, LaunchStatus.HUNG, LaunchStatus.TIMED_OUT)
# gloo ends the process, from a thread of its own, when what comes is larger than what it waits for.
_TOO_LARGE = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")


# Sends a signal to a rank if its process is provably of the launch; False if it got none.
Send = Callable[[RankState, int], bool]


def collect_stacks(run_dir: Path, ranks: Sequence[RankState], send: Send) -> list[Path]:
    """Have the Python stacks of all ranks written into `run_dir` and return the files.

    They come from the trainer itself (SIGUSR1, handled in C, so that a rank that is stuck in
    native code answers too). A rank that cannot answer, because it is frozen, is read from outside
    by py-spy where that is installed.
    """
    alive = [state for state in ranks if state.pid is not None and state.died_at is None]
    files = _answers(run_dir, alive, send, signal.SIGUSR1, STACKDUMPS, within_s=_STACKS_WITHIN_S)
    told = {STACKDUMPS.rank_of(path.name) for path in files}
    silent = [state for state in alive if state.rank not in told]
    return files + [path for state in silent if (path := _read_outside(run_dir, state))]


def collect_flights(run_dir: Path, ranks: Sequence[RankState], send: Send) -> list[Path]:
    """Have every rank that can answer write its flight record (SIGUSR2); return the fresh ones.

    A thread of the rank answers, so one that is stuck in a collective or sleeps answers too; one
    that is frozen, or holds the interpreter's lock, does not.
    """
    alive = [state for state in ranks if state.died_at is None]
    return _answers(run_dir, alive, send, signal.SIGUSR2, FLIGHTS, within_s=_FLIGHTS_WITHIN_S)


def _answers(
    run_dir: Path,
    ranks: Sequence[RankState],
    send: Send,
    number: int,
    kind: RankFiles,
    *,
    within_s: float,
) -> list[Path]:
    """Ask all ranks that can answer a signal; the files that they wrote, whole, or so far."""

    def seen() -> dict[Path, tuple[int, int]]:
        states = {path: path.stat() for path in run_dir.glob(kind.glob())}
        return {path: (one.st_size, one.st_mtime_ns) for path, one in states.items()}

    before, last = seen(), dict[Path, tuple[int, int]]()
    able = [r for r in ranks if r.pid is not None and r.process_state not in STOPPED]
    asked = {state.rank for state in able if send(state, number)}
    deadline = time.monotonic() + (within_s if asked else 0.0)
    while time.monotonic() < deadline:
        time.sleep(0.03)
        now = {path: one for path, one in seen().items() if before.get(path) != one}
        if now == last and asked <= {kind.rank_of(path.name) for path in now}:
            break
        last = now
    return sorted(last)


def name_culprit(watchdog: Watchdog, watch: RankWatch, send: Send) -> tuple[End, list[Path]]:
    """Who is to blame for a hang that was found, and the stacks of all ranks.

    The evidence comes first: where all ranks are equally far, only it tells who is waited for.
    """
    ranks = list(watch.ranks.values())
    flights = collect_flights(watch.run_dir, ranks, send)
    stacks = collect_stacks(watch.run_dir, ranks, send)
    entered = last_numbers(read_flights(watch.run_dir, token=watch.token)) if flights else None
    busy = busy_ranks(stacks)
    return watchdog.name_culprit(ranks, now=time.monotonic(), busy=busy, entered=entered), stacks


def busy_ranks(files: Sequence[Path]) -> frozenset[int]:
    """Ranks whose main thread is in code of its own: not inside torch, waiting for the others."""
    busy = set()
    for path in files:
        rank = STACKDUMPS.rank_of(path.name)
        frames = _main_frames(path.read_text("utf-8", "replace"))
        if rank is not None and frames and "/torch/" not in frames[0][0]:
            busy.add(rank)
    return frozenset(busy)


def stopped_at(run_dir: Path, end: End) -> tuple[str, ...]:
    """Where the culprit of a hang was: the innermost functions of code of its own, innermost first.

    `nsa/step/engine.py:310 in gradients()`, without what packages and Python itself called.
    """
    if end.status is not LaunchStatus.HUNG or end.culprit_rank is None:
        return ()
    return tuple(_own_places(run_dir, end.culprit_rank)[:_OWN])


def _own_places(run_dir: Path, rank: int) -> list[str]:
    """Where the main thread of a rank was by its last dump, in its own code, innermost first."""
    dumps = [p for p in run_dir.glob(STACKDUMPS.glob(rank)) if p.stat().st_size]
    newest = max(dumps, key=lambda path: path.stat().st_mtime_ns, default=None)
    dump = newest.read_text("utf-8", "replace") if newest else ""
    return [
        # So that nobody takes a name for a word; `<module>` is none.
        f"{_shown_path(name)}:{line} in {function}{'' if function.startswith('<') else '()'}"
        for name, line, function in _main_frames(dump)
        if not _NOT_ITS_OWN.search(name)
    ]


def _shown_path(name: str) -> str:
    """Relative to where the program runs or its packages lie, if it is below that."""
    for folder in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if Path(name).is_relative_to(folder):
            return Path(name).relative_to(folder).as_posix()
    return name


def _main_frames(dump: str) -> list[tuple[str, str, str]]:
    """(file, line, function), the newest first, of the main thread in the text's last dump."""
    found: list[tuple[str, str, str]] = []
    for thread in re.split(r"^(?:Current thread|Thread) ", dump, flags=re.MULTILINE)[1:]:
        frames = _FRAME.findall(thread)
        # The main thread is the one that was entered through a module.
        if frames and frames[-1][2] in ("<module>", "_run_module_as_main"):
            found = frames
    return found


def _read_outside(run_dir: Path, state: RankState) -> Path | None:
    """The stack of a rank of this machine that cannot answer, by py-spy where that is installed."""
    tool = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    if tool is None or state.pid is None or state.told_state is not None:
        return None
    command = [tool, "dump", "--nonblocking", "--pid", str(state.pid)]
    done = run_tool(command, timeout_s=_TOOL_WITHIN_S)
    if not done.stdout.strip():
        return None
    path = run_dir / STACKDUMPS.name(state.rank, "outside")
    path.write_text(done.stdout, encoding="utf-8")
    return path


def _process_of(state: RankState) -> dict[str, int | str | None]:
    if state.for_all:
        return dict.fromkeys(("rank", "pid", "process_state"))
    now = state.process_state if state.died_at is None else "gone"
    return {"rank": state.rank, "pid": state.pid, "process_state": now}


def write_summary(watch: RankWatch, cause: str) -> Path:
    """Write `incident.json`: the cause, and of each rank its state and last heartbeats.

    One voice for all ranks has no rank and no process of its own.
    """
    document = {
        "cause": cause,
        "ranks": [
            {
                **_process_of(state),
                "silent_s": round(time.monotonic() - state.changed_at, 3),
                "phase": state.phase,
                "step": state.step,
                "last_heartbeats": list(state.recent),
            }
            # Not in the order in which their files happened to appear.
            for _, state in sorted(watch.ranks.items())
        ],
    }
    path = watch.run_dir / INCIDENT_JSON
    write_document(path, document)
    return path


def bundle(
    watch: RankWatch,
    end: End,
    *,
    console: Sequence[str],
    load: Load | None,
    where: Callable[[int], str],
) -> tuple[End, list[Path], tuple[str, ...]]:
    """The end with its cause made exact by the flight records, the evidence, and notes.

    A good end has no evidence; it may have a note about who was always late, and whether the `load`
    alone may explain that. `where` gives the node of a rank. For a bad end the files are the
    incident's summary, every stack and flight record, and what a watcher wrote.
    """
    run_dir = watch.run_dir
    flights = read_flights(run_dir, token=watch.token)
    if end.status is LaunchStatus.COMPLETED:
        late = find_straggler(flights, where)
        if late is None:
            return end, [], ()
        node = "" if late.is_short_of_cpus(load) else late.node
        return replace(end, node=node), [], (late.text(load),)
    end = _exact(end, flights, run_dir, console)
    files = [p for p in sorted(run_dir.glob(STACKDUMPS.glob())) if p.stat().st_size]
    files += [path for kind in (FLIGHTS, NCCL_FLIGHTS) for path in kind.found_in(run_dir).values()]
    files += [p for name in (ANOMALY_TYPE, ANOMALIES_JSONL) if (p := run_dir / name).is_file()]
    summary = run_dir / INCIDENT_JSON
    if end.status in _NO_INCIDENT:
        return end, files, ()
    if not summary.exists():
        write_summary(watch, end.cause)
    return end, [*files, summary], ()


def _exact(end: End, flights: dict[int, Flight], run_dir: Path, console: Sequence[str]) -> End:
    if end.status not in _MAY_BE_DESYNC:
        return end
    desync = find_desync(flights)
    if desync is not None:
        culprit = end.culprit_rank if desync.rank is None else desync.rank
        cause = f"{desync.text()} ({end.cause})"
        return replace(end, cause=cause, culprit_rank=culprit, kind=Kind.DESYNC)
    told = said_by_watchdog(console, None) if end.status is LaunchStatus.HUNG else ""
    if told:
        # NCCL gave up, but its abort waits for the device too: the process stays until it is ended.
        end = replace(end, cause=f"{end.cause}; NCCL's watchdog: {told}")
    if said_by_watchdog([end.cause], None):
        return _waited_for(end, flights)
    said = next((m for line in console if (m := _TOO_LARGE.search(line))), None)
    if said is None or end.culprit_rank is None or end.culprit_rank in flights:
        return end
    return _aborted(end, end.culprit_rank, flights, run_dir, f"{said[1]} for {said[2]}")


def _waited_for(end: End, flights: dict[int, Flight]) -> End:
    """NCCL's watchdog aborts the rank that waits; the records say which one did not come."""
    last = last_numbers(flights)
    behind = [rank for rank, number in last.items() if number == min(last.values())]
    if len(behind) != 1 or len(last) < 2:
        return end
    (late,) = behind
    cause = f"rank {late} did not come to collective {last[late] + 1} ({end.cause})"
    return replace(end, cause=cause, culprit_rank=late)


def _aborted(end: End, aborted: int, flights: dict[int, Flight], run_dir: Path, sizes: str) -> End:
    """A desync that ended one rank on the spot: the others' records say whether it was theirs."""
    told = {rank: flight[-1] for rank, flight in flights.items() if flight}
    place = next(iter(_own_places(run_dir, aborted)), "")
    seen = [f"rank {rank}: {last.what}" for rank, last in sorted(told.items())]
    seen.append(f"rank {aborted} was ended at {place or 'an unknown place'}")
    number = max((last.seq for last in told.values()), default=0)
    cause = f"desync at collective {number}, sizes {sizes}: {'; '.join(seen)} ({end.cause})"
    strayed = [rank for rank in told if left_the_pattern(flights[rank])]
    culprit = strayed[0] if len(strayed) == 1 else aborted
    return replace(end, cause=cause, culprit_rank=culprit, kind=Kind.DESYNC)
