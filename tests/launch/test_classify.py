"""What an end means, and whose it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.folder.launch.heartbeats import Exit
from runbook.launch.end import End, classify_trainer, is_communication_failure, rank_exits
from runbook.launch.watch.ranks import RankState
from runbook.records import LaunchStatus
from tests.launch.helpers import rank


@pytest.mark.parametrize(
    ("oom", "status", "sign"),
    [
        ((1, 2), LaunchStatus.OUT_OF_MEMORY, "oom_kill 1 -> 2"),
        ((1, 1), LaunchStatus.CRASHED, "cause unknown (not for memory)"),
        ((None, None), LaunchStatus.CRASHED, "counter is unreadable"),
    ],
)
def test_sigkill_is_told_apart_from_memory(
    oom: tuple[int | None, int | None], status: LaunchStatus, sign: str
) -> None:
    console = ["x failed (exitcode: -9) local_rank: 1 (pid: 12) of binary: python"]
    ranks = [rank(0, age=0), rank(1, age=0)]
    ranks[1].died_at = 999.0
    exits = rank_exits(ranks, 1, console)
    end = classify_trainer(ranks, exits, child_code=1, wanted=2, oom=oom, console=console)
    assert (end.status, end.culprit_rank) == (status, 1)
    assert sign in end.cause


def test_a_peer_that_lost_its_connection_is_not_to_blame() -> None:
    console = ["x failed (exitcode: -11) local_rank: 1 (pid: 12) of binary: python"]
    ranks = [rank(0, age=9), rank(1, age=0)]
    ranks[0].exit_code, ranks[0].exit_reason = 1, "RuntimeError: NCCL error: peer is gone"
    ranks[1].died_at = 999.9
    end = classify_trainer(
        ranks, rank_exits(ranks, 1, console), child_code=1, wanted=2, oom=(0, 0), console=console
    )
    assert (end.culprit_rank, "SIGSEGV" in end.cause) == (1, True)
    assert not is_communication_failure(end, [*console, "NCCL error"])


def test_a_rank_that_is_killed_after_its_good_exit_is_named() -> None:
    ranks = [
        RankState(
            rank=rank, path=Path("x"), exit=Exit(code=0, reason="", steps_done=15), died_at=1.0
        )
        for rank in (0, 1)
    ]
    ranks[1].parent_saw = -9
    exits = rank_exits(ranks, 1, [])
    assert [(e.code, e.signal) for e in exits] == [(0, None), (-9, "SIGKILL")]
    end = classify_trainer(ranks, exits, child_code=1, wanted=2, oom=(0, 0), console=[])
    assert (end.status, end.culprit_rank) == (LaunchStatus.CRASHED, 1)


def test_the_error_line_of_a_rank_without_an_exit_event_is_its_own() -> None:
    ranks = [RankState(rank=rank, path=Path("x"), died_at=1.0 + rank) for rank in (0, 1)]
    ranks[0].parent_saw = 7
    console = ["[rank0]: OSError: mine", "[rank1]: RuntimeError: Connection closed by peer"]
    end = classify_trainer(
        ranks, rank_exits(ranks, 1, console), child_code=1, wanted=2, oom=(0, 0), console=console
    )
    assert end.cause == "rank 0 ended: exit code 7: [rank0]: OSError: mine"


def aborted(*lines: str) -> End:
    """Rank 0 of two was ended by SIGABRT; torchrun says so after these lines."""
    told = "x failed (exitcode: -6) local_rank: 0 (pid: 12) of binary: python"
    ranks = [rank(0, age=0), rank(1, age=0)]
    ranks[0].died_at = 999.0
    console = [*lines, told]
    exits = rank_exits(ranks, 1, console)
    return classify_trainer(ranks, exits, child_code=1, wanted=2, oom=(0, 0), console=console)


TIMED_OUT = (
    "[rank0]:[E626 06:24:44.903 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, "
    "NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
)
THEN = (
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated "
    "with exception: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808)",
)


@pytest.mark.parametrize(
    "lines",
    [
        (TIMED_OUT, *THEN),
        THEN,
        ("[rank0]:[F ProcessGroupNCCL.cpp:1200] ProcessGroupNCCL's watchdog got stuck for 480 s",),
    ],
)
def test_an_abort_by_nccls_watchdog_is_a_failure_of_communication(lines: tuple[str, ...]) -> None:
    end = aborted(*lines)
    assert (end.status, end.culprit_rank) == (LaunchStatus.CRASHED, 0)
    assert "by NCCL's watchdog: " in end.cause and "\n" not in end.cause
    assert is_communication_failure(end, lines)


@pytest.mark.parametrize(
    "line",
    [
        "[rank0]: [PG ID 0 Rank 0] Process group watchdog thread terminated with exception: CUDA "
        "error: an illegal memory access was encountered",
        "terminate called after throwing an instance of 'c10::Error'",
        TIMED_OUT.replace("rank0", "rank1").replace("Rank 0", "Rank 1"),
    ],
)
def test_another_abort_is_a_crash_and_not_tried_again(line: str) -> None:
    end = aborted(line)
    assert "SIGABRT" in end.cause and not is_communication_failure(end, [line])
    assert ("CUDA error: an illegal" in end.cause) == ("CUDA" in line)
