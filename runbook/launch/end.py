"""What an end means: from exit heartbeats, signals, the console and the kernel."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nsa.contract import ELSEWHERE, PARTED, RANK_LINE, REFUSAL, ExitCode
from runbook.folder.launch.documents import Load
from runbook.launch.watch.rank_state import RankState
from runbook.machine.kernel_log import KernelLine
from runbook.machine.surroundings import DISK_FULL
from runbook.records import End, Kind, LaunchResult, LaunchStatus, RankExit

_BY_CODE: dict[int, LaunchStatus] = {
    ExitCode.CONFIG: LaunchStatus.CONFIG_ERROR,
    ExitCode.HALTED: LaunchStatus.HALTED,
    ExitCode.NONFINITE: LaunchStatus.NON_FINITE,
    ExitCode.OUT_OF_MEMORY: LaunchStatus.OUT_OF_MEMORY,
    ExitCode.PREEMPTED: LaunchStatus.PREEMPTED,
}
_AGREED = (ExitCode.HALTED, ExitCode.NONFINITE)
# torchrun says at once which of its children ended first, and how.
_TORCHRUN_SAYS = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_COMMUNICATION = re.compile(
    r"nccl(System|Internal|Remote|UnhandledCuda)Error|NCCL error|NCCL communicator was aborted"
    r"|Watchdog caught collective operation timeout|EADDRINUSE|[Aa]ddress already in use"
    r"|DistNetworkError|client socket has timed out|watchdog got stuck for"
)
# What NCCL's watchdog thread says before it aborts the process, of a timeout or a CUDA error.
_WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout|watchdog got stuck for"
    r"|watchdog thread terminated with exception"
)
_OF_RANK = re.compile(r"\bRank (\d+)\]")
_ERROR = re.compile(r"\b\w*(Error|Exception)\b.*:|\berror:|^cannot start ")
# A line of torchrun itself: of its log, or of a traceback through its files.
_TORCHRUN = re.compile(r"torch[./]distributed[./]elastic|ChildFailedError|failed \(exitcode")
TAIL_LINES = 400
_JUNIT_CODES = (0, 1, 5)


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """What is known once nothing of a launch is alive.

    `oom` is the kernel's count of processes that it killed for memory, before and after. `slots`
    are the PCI places of the GPUs that the launch could use. `node` is where the command ended as
    the exit code says; empty where there is only this machine.
    """

    exit_code: int | None
    oom: tuple[int | None, int | None] = (None, None)
    kernel: Sequence[KernelLine] = ()
    slots: tuple[str, ...] = ()
    load: Load | None = None
    node: str = ""


def rank_exits(
    ranks: Sequence[RankState], child_code: int | None, console: Sequence[str]
) -> tuple[RankExit, ...]:
    """One entry per rank: code and reason from its exit heartbeat, signal from its parent."""
    states = {state.rank: state for state in ranks}
    told = told_by_parent(console, ranks)
    exits = []
    for rank in sorted(states.keys() | told.keys()):
        state = states.get(rank)
        code = state.exit_code if state else None
        said = state.exit.steps_done if state and state.exit else None
        if code in (None, 0):
            # Also after a good exit heartbeat: a rank may still be killed, or crash, afterwards.
            seen = state.parent_saw if state else None
            seen = told.get(rank) if seen is None else seen
            code = code if seen is None else seen
            if code is None and len(states) == 1:
                code = child_code
        exits.append(
            RankExit(
                rank=rank,
                code=code,
                signal=signal_name(code),
                reason=state.exit_reason if state else "",
                steps_done=state.step if state and said is None else said,
                late_rows=state.late_rows if state else {},
                **(state.clocks() if state else {}),
            )
        )
    return tuple(exits)


def classify_trainer(
    ranks: Sequence[RankState],
    exits: Sequence[RankExit],
    after: Aftermath,
    *,
    child_code: int | None,
    wanted: int,
    console: Sequence[str],
) -> End:
    """The end of a trainer launch, or of what was left of it after a rank had failed.

    Completed only if the command ended with 0 and every rank said its own good end. `child_code`
    is None if the command did not end by itself.
    """
    good = [e for e in exits if e.code == 0]
    if child_code == 0 and len(good) == len(exits) == wanted:
        return End(status=LaunchStatus.COMPLETED)
    if wanted > 1 and child_code is not None and child_code < 0:
        on = f" on node {after.node}" if after.node else ""
        cause = f"the ranks' parent{on} was ended by {signal_name(child_code)}, and they with it"
        return End(status=LaunchStatus.CRASHED, cause=cause)
    culprit = _first_to_fail(ranks, exits)
    if culprit is None:
        return _without_culprit(exits, child_code, wanted, console)
    if culprit.signal is not None:
        return _ended_by_signal(culprit, after.oom, console)
    trained = any(e.steps_done for e in exits)
    refused = _refused(culprit.code, culprit.reason, console, trained=trained, who=culprit.rank)
    if refused is not None:
        return refused
    status = _BY_CODE.get(culprit.code or 1, LaunchStatus.CRASHED)
    if culprit.code in _AGREED and culprit.reason:
        return End(status=status, cause=culprit.reason)  # all ranks decided it together
    if culprit.code is None:
        what = "its process is gone, and its exit code is unknown"
    else:
        what = culprit.reason or _wordless(culprit, console)
    if what.startswith(PARTED):
        return End(status=LaunchStatus.CRASHED, cause=what, kind=Kind.PARTED)  # said by all alike
    rank = f"rank {culprit.rank}"
    when = f" after step {culprit.steps_done}" if culprit.steps_done else ""
    kind = Kind.DISK_FULL if DISK_FULL.search(what) else Kind.NONE
    cause = f"{rank} ended{when}: {what}"
    return End(status=status, cause=cause, culprit_rank=culprit.rank, kind=kind)


def _refused(
    code: int | None, reason: str, console: Sequence[str], *, trained: bool, who: int | None = None
) -> End | None:
    """The end of a launch whose config or machine is wrong, in the words of the one who said so."""
    if code == ExitCode.CONFIG:
        cause = one_line(reason) or said_by_trainer(console)
        cause = cause or last_error(console) or last_words(console) or f"exit code {code}"
        return End(status=LaunchStatus.CONFIG_ERROR, cause=cause, culprit_rank=who)
    # A machine that trained a step can run the trainer.
    said = "" if trained else said_by_machine([reason] if reason else console)
    status = LaunchStatus.ENVIRONMENT_ERROR
    return End(status=status, cause=said, culprit_rank=who) if said else None


def classify_pytest(child_code: int | None, *, junit: bool, console: Sequence[str]) -> End:
    """The end of a pytest launch: whatever pytest could report on is completed, not passed.

    Failed tests (1) and nothing collected (5) are for the JUnit file and its judge.
    """
    if child_code in _JUNIT_CODES and junit:
        return End(status=LaunchStatus.COMPLETED)
    status = LaunchStatus.CONFIG_ERROR if child_code == 4 else LaunchStatus.CRASHED
    missing = "" if junit else ", no junit.xml"
    word = last_error(console)
    return End(status=status, cause=f"pytest ended with {child_code}{missing}: {word}".rstrip(": "))


def classify_plain(child_code: int | None, console: Sequence[str]) -> End:
    """The end of a program that says with its exit code alone how it went."""
    if child_code == 0:
        return End(status=LaunchStatus.COMPLETED)
    word = last_error(console) or last_words(console)
    return End(status=LaunchStatus.CRASHED, cause=f"ended with {child_code}: {word}".rstrip(": "))


def is_communication_failure(end: End | LaunchResult, console: Sequence[str]) -> bool:
    """Is the collective library or the port to blame, rather than a rank?"""
    if end.status not in (LaunchStatus.CRASHED, LaunchStatus.ENVIRONMENT_ERROR):
        return False
    if end.culprit_rank is not None:
        return _COMMUNICATION.search(end.cause) is not None
    return any(_COMMUNICATION.search(line) for line in console[-TAIL_LINES:])


def told_by_parent(console: Sequence[str], ranks: Sequence[RankState] = ()) -> dict[int, int]:
    """Exit codes by rank, in the order in which torchrun said that its children failed.

    It tells a rank's place on its own node, which is its rank only where there is one node; so its
    process comes first.
    """
    known = {state.pid or state.foreign_pid: state.rank for state in ranks}
    told: dict[int, int] = {}
    for line in console[-TAIL_LINES:]:
        match = _TORCHRUN_SAYS.search(line)
        if match:
            code, place, pid = (int(text) for text in match.groups())
            told.setdefault(known.get(pid, place), code)
    return told


def signal_name(code: int | None) -> str | None:
    """The name of the signal of a negative exit code."""
    if code is None or code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _first_to_fail(ranks: Sequence[RankState], exits: Sequence[RankExit]) -> RankExit | None:
    """The rank whose end the others followed: a named code outranks a peer's broken pipe."""
    when = {state.rank: state.died_at or state.changed_at for state in ranks}
    dead = {state.rank for state in ranks if state.died_at is not None}
    # Pre-empted is what a parent's SIGTERM leaves behind, so no rank is to blame.
    bad = [
        e
        for e in exits
        if e.code not in (ExitCode.SUCCESS, ExitCode.PREEMPTED, None)
        or (e.code is None and e.rank in dead)
    ]
    named = [e for e in bad if e.signal is not None or e.code in _BY_CODE]
    # No peer can cause a refusal, but a refusal ends the peers.
    refusing = [e for e in bad if e.code == ExitCode.CONFIG][:1]
    for group in (refusing, named, bad, [e for e in exits if e.code == ExitCode.PREEMPTED]):
        if group:
            return min(group, key=lambda e: (ELSEWHERE in e.reason, when.get(e.rank, 0.0)))
    return None


def _wordless(culprit: RankExit, console: Sequence[str]) -> str:
    """What is known of a rank that ended without its exit event: its code, its last error line."""
    code = f"exit code {culprit.code}"
    word = last_error(without_others(console, culprit.rank))
    return f"{code}: {word}" if word else code


def without_others(console: Sequence[str], rank: int | None) -> list[str]:
    """The console without the lines of other ranks, which may only follow; all if None."""
    told = [(line, RANK_LINE.match(line)) for line in console]
    return [line for line, m in told if None in (m, rank) or (m and int(m.group(1)) == rank)]


def said_by_watchdog(console: Sequence[str], rank: int | None) -> str:
    """What NCCL's watchdog of a rank (of any, if None) said first; empty if it said nothing."""
    for line in console:
        found = _WATCHDOG.search(line)
        teller = RANK_LINE.match(line) or _OF_RANK.search(line)
        if found and (rank is None or teller is None or int(teller.group(1)) == rank):
            return one_line(line[found.start() :])[:500]
    return ""


def killed_for_memory(name: str | None, oom: tuple[int | None, int | None]) -> str:
    """Words for the kernel's kill, where its counter rose before and after; else empty."""
    before, after = oom
    if name != "SIGKILL" or before is None or after is None or after <= before:
        return ""
    return f"the kernel killed it for memory (oom_kill {before} -> {after})"


def _ended_by_signal(
    culprit: RankExit, oom: tuple[int | None, int | None], console: Sequence[str]
) -> End:
    rank = f"rank {culprit.rank} was ended by {culprit.signal} at step {culprit.steps_done}"
    watchdog = said_by_watchdog(console, culprit.rank) if culprit.signal == "SIGABRT" else ""
    rank += f", by NCCL's watchdog: {watchdog}" if watchdog else ""
    if killed := killed_for_memory(culprit.signal, oom):
        return End(
            status=LaunchStatus.OUT_OF_MEMORY,
            cause=f"{rank}: {killed}",
            culprit_rank=culprit.rank,
            kind=Kind.HOST_MEMORY,
        )
    if culprit.signal == "SIGKILL":
        known = "not for memory" if oom[1] is not None else "the kernel's counter is unreadable"
        rank = f"{rank}, cause unknown ({known})"
    return End(status=LaunchStatus.CRASHED, cause=rank, culprit_rank=culprit.rank)


def _without_culprit(
    exits: Sequence[RankExit], child_code: int | None, wanted: int, console: Sequence[str]
) -> End:
    failed = child_code not in (None, 0) and not exits
    if failed and (refused := _refused(child_code, "", console, trained=False)) is not None:
        return refused
    if child_code == 0:
        silent = sorted(set(range(wanted)) - {e.rank for e in exits if e.code == 0})
        cause = f"ended with 0, but ranks {silent} wrote no exit heartbeat with code 0"
        return End(status=LaunchStatus.CRASHED, cause=cause)
    what = last_error(console)
    word = "no exit code" if child_code is None else signal_name(child_code) or f"code {child_code}"
    cause = f"ended with {word}"
    return End(status=LaunchStatus.CRASHED, cause=f"{cause}: {what}" if what else cause)


def last_error(console: Sequence[str]) -> str:
    """The last line that reads like an error of the program itself, not of torchrun."""
    for line in reversed(console[-TAIL_LINES:]):
        if _ERROR.search(line) and not _TORCHRUN.search(line):
            return line.strip()[:500]
    return ""


# What torch, CUDA, the loader and torchrun's rendezvous say of a machine that cannot run them.
_MACHINE = re.compile(
    r"TCPStore backend does not support|built without libuv support"
    r"|Rendezvous(Connection|Timeout|Closed|State)Error"
    r"|server socket has failed to listen"
    r"|Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device"
    r"|Torch not compiled with CUDA enabled|CUDA driver version is insufficient"
    r"|NVIDIA driver on your system is too old|no kernel image is available"
    r"|invalid device ordinal|system not yet initialized"
    r"|error while loading shared libraries|No module named '?torch\b"
)


def one_line(text: str) -> str:
    """A message of several lines as one."""
    return " ".join(text.split())


def said_by_machine(lines: Iterable[str]) -> str:
    """The first of these lines in which the machine refuses to run a trainer; empty if none."""
    for line in lines:
        if _MACHINE.search(line):
            return one_line(_own(line))[:500]
    return ""


def said_by_trainer(console: Sequence[str]) -> str:
    """Why the trainer refused to start, from its console: its list of problems; empty if none."""
    for start, line in enumerate(console):
        if REFUSAL in line:
            words = [_own(line)]
            for more in console[start + 1 :]:
                if not more.startswith("  - "):
                    break
                words.append(more)
            return one_line(" ".join(words))[:2000]
    return ""


def last_words(console: Sequence[str]) -> str:
    """The last line that is not torchrun's: all there is of a trainer that refuses wordlessly."""
    ours: list[str] = []
    for line in console:
        if _TORCHRUN.search(line) or line.startswith("Traceback"):
            break
        ours.append(line)
    return next((one_line(_own(line))[:500] for line in reversed(ours) if line.strip()), "")


def _own(line: str) -> str:
    return RANK_LINE.sub("", line, count=1).lstrip(": ")
